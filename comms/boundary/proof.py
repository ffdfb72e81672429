"""How a process shows another one that it knows a secret, without saying it.

Both ends draw a nonce, and the proof is an HMAC over both (challenge and response, ISO/IEC 9798-4; RFC 2104): what was
captured on the way proves nothing in another connection, and tells nothing of the secret. The two directions have words
of their own, so that an answer is never taken for a question.

What comes over a connection after that is neither signed nor encrypted: see SECURITY.md.
"""

import hmac
import secrets

NONCE_NBYTES = 16
"""Bytes of a nonce: two of them are alike once in 2**64 connections."""

PROOF_NBYTES = 32
"""Bytes of a proof: HMAC-SHA-256."""


def new_nonce() -> bytes:
    """Draws a nonce for one connection."""
    return secrets.token_bytes(NONCE_NBYTES)


def proof_of(secret: bytes, what: str, *said: bytes) -> bytes:
    """Return a proof that the sender of a message knows a secret.

    Args:
        secret: Which.
        what: What is proved, in a word that differs between the two directions.
        said: Both nonces, and what has to be as it was said.
    """
    parts = (what.encode(), *said)
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def is_proved(proof: bytes, secret: bytes, what: str, *said: bytes) -> bool:
    """Return whether a proof equals that of `proof_of`, compared in constant time."""
    return hmac.compare_digest(proof, proof_of(secret, what, *said))
