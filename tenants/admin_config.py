"""Django's handle on the admin: its pages are those of ``tenants.admin_site``."""

from django.contrib.admin.apps import AdminConfig


class OurAdminConfig(AdminConfig):
    default_site = "tenants.admin_site.Site"
