"""The Django project and the door: everything a client, a tenant or an operator talks to."""
