"""How ranks find each other: placement, stores, launchers, failures, torch's private names."""
