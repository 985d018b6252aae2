"""Responses whose caller asked for them to be kept (``store``): rows behind the wall between tenants."""
