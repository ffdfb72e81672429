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
    """Returns 16 new random bytes, a nonce for one connection."""
    return secrets.token_bytes(NONCE_NBYTES)


def proof_of(secret: bytes, label: str, *parts: bytes) -> bytes:
    """Returns a proof that the sender of a message knows a secret: an HMAC-SHA-256 over the label and the parts.

    Args:
        secret: Key of the HMAC.
        label: Name of the proof; differs between the two directions of a connection.
        parts: The nonces of both ends, and the content that must arrive unchanged; their order and lengths count.
    """
    content = (label.encode(), *parts)
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in content), "sha256")


def is_proved(proof: bytes, secret: bytes, label: str, *parts: bytes) -> bool:
    """Returns whether a received proof is that of `proof_of` for the same other arguments; compares in constant time.

    Args:
        proof: Proof that was received.
        secret: The secret that both ends know.
        label: Name of the proof.
        parts: The nonces of both ends, and the content.
    """
    return hmac.compare_digest(proof, proof_of(secret, label, *parts))
