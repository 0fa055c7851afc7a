"""Attacks on a gateway by strangers, tried with real processes, and the bounds within which it must stay
(docs/security.md)."""
