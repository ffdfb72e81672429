"""Proves to another process that this one knows a secret, without sending the secret.

Both ends draw a nonce, and the proof is an HMAC over both (challenge and response, ISO/IEC 9798-4; RFC 2104): a proof
that was captured is worth nothing in another connection, and reveals nothing of the secret. Each direction proves
another word, so that an answer cannot be used as a question.

What comes over a connection after that is neither signed nor encrypted: see SECURITY.md.
"""

import hmac
import secrets

NONCE_NBYTES = 16
"""Bytes of a nonce: equal ones are to be expected only after some 2**64 connections."""

PROOF_NBYTES = 32
"""Bytes of a proof: HMAC-SHA-256."""


def new_nonce() -> bytes:
    """Returns a new random nonce, for one connection."""
    return secrets.token_bytes(NONCE_NBYTES)


def proof_of(secret: bytes, what: str, *said: bytes) -> bytes:
    """Returns a proof that the sender of a message knows a secret: an HMAC over all arguments.

    Args:
        secret: The secret.
        what: Name of what is proved; differs between the two directions of a connection.
        said: The nonces of both ends, and the content that must arrive unchanged.
    """
    parts = (what.encode(), *said)
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def is_proved(proof: bytes, secret: bytes, what: str, *said: bytes) -> bool:
    """Returns whether a received proof is that of `proof_of` for the same other arguments; compares in constant time.

    Args:
        proof: Proof that was received.
        secret: The secret that both ends know.
        what: Name of what is proved.
        said: The nonces of both ends, and the content.
    """
    return hmac.compare_digest(proof, proof_of(secret, what, *said))
