"""Webhooks of a tenant: what has happened, told to an address of its own, signed, again and again until it is heard."""
