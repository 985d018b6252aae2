"""What a tenant manages by program: projects, keys, members, usage, statements and the audit trail.

Django REST framework, behind the tenant's wall; refuses inference. Its keys are of their own kind and carry a role.
"""
