"""The tenant's console: pages for members, each behind the tenant's wall and the capability of its role."""
