"""Django's settings, all of them, from the environment.

Where the environment names no database, the services that ``manage.py up`` keeps in the data folder are used, so that
``manage.py shell`` in a second terminal works. An empty DATABASE_URL means: no database at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery.schedules import crontab
from django.core.exceptions import ImproperlyConfigured

from gateway import logs
from gateway.databases import ALIASES, database_settings
from gateway.embedded.service import kept_secret

BASE_DIR = Path(__file__).resolve().parents[2]
DATA_DIR = Path(os.environ.get("RUBATO_DATA") or BASE_DIR / ".rubato").resolve()
SERVICES_FILE = DATA_DIR / "services.json"


def _services() -> dict[str, str]:
    """Addresses by environment name: given ones win, else those of the data folder."""
    names = [*ALIASES.values(), "REDIS_URL"]
    known = json.loads(SERVICES_FILE.read_text(encoding="utf-8")) if SERVICES_FILE.exists() else {}
    return {name: os.environ.get(name, known.get(name, "")) for name in names}


def _flag(name: str) -> bool:
    return os.environ.get(name, "") in ("1", "true", "yes")


_addresses = _services()

DEBUG = _flag("DEBUG")
SECRET_KEY = os.environ.get("SECRET_KEY") or kept_secret(DATA_DIR / "secret-key")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",")
CSRF_TRUSTED_ORIGINS = [origin for origin in os.environ.get("CSRF_TRUSTED_ORIGINS", "").split(",") if origin]

ROOT_URLCONF = "gateway.urls"
ASGI_APPLICATION = "gateway.asgi.application"
INSTALLED_APPS = [
    "tenants.admin_config.OurAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "rest_framework",
    "drf_spectacular",
    "channels",
    "tenants",
    "billing",
    "gateway",
    "gateway.batches",
    "gateway.console",
    "gateway.stored",
    "gateway.webhooks",
]
MIDDLEWARE = [
    "gateway.management_api.middleware.Numbered",
    "django.middleware.security.SecurityMiddleware",
    "gateway.downloads.WholeGzip",
    "gateway.console.middleware.ContentSecurityPolicy",
    "gateway.console.middleware.PlainText",
    "gateway.console.middleware.StaticFiles",
    "gateway.console.middleware.Fragments",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "gateway.console.middleware.BackToItsPage",
    "allauth.account.middleware.AccountMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "builtins": ["gateway.console.templatetags.times", "gateway.console.templatetags.amounts"],
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "gateway.console.sessions.sign_in",
            ],
        },
    },
]

# One database, three roles: gateway/databases.py.
DATABASES: dict[str, dict[str, Any]] = database_settings({alias: _addresses[name] for alias, name in ALIASES.items()})
DATABASE_ROUTERS = ["gateway.databases.OwnerMigrates"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Redis or Valkey: limits, the Bus, Celery's broker, and pings to consoles (never tokens).
REDIS_URL = _addresses["REDIS_URL"]
CHANNEL_LAYERS: dict[str, dict[str, Any]] = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        # redis-py waits 5 s on a socket by default; the layer's own blocking reads last as long and would be cut.
        "CONFIG": {"hosts": [{"address": REDIS_URL, "socket_timeout": 60}], "prefix": "rubato:channels"},
    },
}
CELERY_BROKER_URL = REDIS_URL
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 3600, "global_keyprefix": "rubato:celery:"}
CELERY_TASK_IGNORE_RESULT = True  # states live in our own tables
CELERY_TASK_ACKS_LATE = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "proposals": {"task": "gateway.tasks.apply_due_proposals", "schedule": 5.0, "options": {"expires": 5.0}},
    # Ten minutes after midnight, which is at a full quarter of an hour everywhere: billing.statements.GRACE.
    "statements": {
        "task": "billing.tasks.close_statements",
        "schedule": crontab(minute="10,25,40,55"),
        "options": {"expires": 900.0},
    },
    "policy": {"task": "gateway.tasks.publish_policy_if_stale", "schedule": 30.0, "options": {"expires": 30.0}},
    "batches": {"task": "gateway.batches.tasks.look_after_batches", "schedule": 15.0, "options": {"expires": 15.0}},
    "files": {"task": "gateway.batches.tasks.sweep_files", "schedule": 60.0, "options": {"expires": 60.0}},
    "webhooks": {"task": "gateway.webhooks.tasks.tell", "schedule": 5.0, "options": {"expires": 5.0}},
    "responses": {"task": "gateway.stored.tasks.sweep_responses", "schedule": 3600.0, "options": {"expires": 3600.0}},
}
CELERY_BEAT_SCHEDULE_FILENAME = str(DATA_DIR / "celery-beat-schedule")

# The product.
RUBATO_POLICY_DOCUMENT = "billing.selectors.current_policy_document"
RUBATO_PRICES = "billing.selectors.prices_by_place"
RUBATO_PRICE_WRITER = "billing.services.write_changes"
RUBATO_POLICY_PUBLISHER = "gateway.policy_feed.publish"
RUBATO_POLICY_NEEDS_APPROVAL = _flag(
    "RUBATO_POLICY_NEEDS_APPROVAL"
)  # a second person agrees to edits of policy, prices
RUBATO_KEY_PUBLISHER = "gateway.policy_feed.revoked"
RUBATO_RECORDED_DIR = os.environ.get("RUBATO_RECORDED_DIR") or str(DATA_DIR / "recorded")  # what workers record
RUBATO_EXECUTOR = os.environ.get("RUBATO_EXECUTOR", "model")  # "model" or "simulated"
RUBATO_MODEL_PATH = os.environ.get("RUBATO_MODEL_PATH", "")  # empty: a vocabulary of bytes, for the simulated executor
RUBATO_DEMO_MODEL_PATH = BASE_DIR / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"  # where gpu_worker.demo_model puts it
RUBATO_METRICS_TOKEN = os.environ.get("RUBATO_METRICS_TOKEN", "")  # who brings it reads tenants' series on /metrics too
RUBATO_REDIS_PREFIX = os.environ.get("RUBATO_REDIS_PREFIX", "rubato:")
RUBATO_BODY_LIMIT_BYTES = int(os.environ.get("RUBATO_BODY_LIMIT_BYTES", 1_048_576))
RUBATO_TRUSTED_PROXIES = int(os.environ.get("RUBATO_TRUSTED_PROXIES") or 0)  # in front, each of which every call passes
RUBATO_FILES_DIR = os.environ.get("RUBATO_FILES_DIR") or str(DATA_DIR / "files")
RUBATO_FILE_LIMIT_BYTES = int(os.environ.get("RUBATO_FILE_LIMIT_BYTES", 200 * 1_048_576))
RUBATO_TENANT_FILES_BYTES = int(os.environ.get("RUBATO_TENANT_FILES_BYTES", 10 * 1_073_741_824))
RUBATO_TENANT_OPEN_BATCHES = int(os.environ.get("RUBATO_TENANT_OPEN_BATCHES", 100))  # that have not ended
RUBATO_ARCHIVE_CALLS_PER_MINUTE = int(os.environ.get("RUBATO_ARCHIVE_CALLS_PER_MINUTE", 600))  # of a tenant
RUBATO_WEBHOOKS_MAY_BE_PRIVATE = _flag("RUBATO_WEBHOOKS_MAY_BE_PRIVATE")  # http:// and private addresses too
RUBATO_OPERATOR_TENANT = os.environ.get("RUBATO_OPERATOR_TENANT", "")  # slug; its webhooks hear of the books too
RUBATO_CURRENCY = os.environ.get("RUBATO_CURRENCY", "eur")  # what a million micro-units are called
RUBATO_EVENT_SOURCE = os.environ.get("RUBATO_EVENT_SOURCE", "rubato")  # the source of exported CloudEvents
RUBATO_KEY_ENVIRONMENT = os.environ.get("RUBATO_KEY_ENVIRONMENT", "demo")  # the <env> of sk_<env>_…

LANGUAGE_CODE = "en"
USE_I18N = False
USE_TZ = True
TIME_ZONE = "UTC"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
# People sign in with a name or an address. Accounts are made behind an invitation, never by signing up.
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "console-home"
ACCOUNT_LOGIN_METHODS = {"username", "email"}
ACCOUNT_EMAIL_VERIFICATION = "none"  # the address is the invitation's
ACCOUNT_EMAIL_UNKNOWN_ACCOUNTS = False  # who has no account is written to by nobody
ACCOUNT_ADAPTER = "gateway.console.accounts.InvitedOnly"
ACCOUNT_LOGOUT_REDIRECT_URL = "front"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
ACCOUNT_EMAIL_SUBJECT_PREFIX = "Rubato: "

# Mail, for forgotten passwords. Without a server none is sent, the pages say so, and no link is written anywhere else.
EMAIL_HOST = os.environ.get("EMAIL_HOST", "")
EMAIL_USE_TLS, EMAIL_USE_SSL = _flag("EMAIL_USE_TLS"), _flag("EMAIL_USE_SSL")
EMAIL_PORT = int(os.environ.get("EMAIL_PORT") or (465 if EMAIL_USE_SSL else 587 if EMAIL_USE_TLS else 25))
EMAIL_HOST_USER = os.environ.get("EMAIL_HOST_USER", "")
EMAIL_HOST_PASSWORD = os.environ.get("EMAIL_HOST_PASSWORD", "")
EMAIL_TIMEOUT = 10  # s
EMAIL_BACKEND = f"django.core.mail.backends.{'smtp' if EMAIL_HOST else 'dummy'}.EmailBackend"
DEFAULT_FROM_EMAIL = os.environ.get("DEFAULT_FROM_EMAIL", "")
if EMAIL_HOST and not DEFAULT_FROM_EMAIL:
    raise ImproperlyConfigured("EMAIL_HOST is given, so DEFAULT_FROM_EMAIL must be too: whom mail is from.")

STATIC_URL = "static/"
STATIC_ROOT = None  # files are served from where they lie
WHITENOISE_USE_FINDERS = True  # no collectstatic between a fresh clone and the first page
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}

# Behind TLS (HTTPS=1) cookies and transport are locked to it; the loopback demo speaks plain HTTP.
_https = _flag("HTTPS")
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _https else None
SECURE_SSL_REDIRECT = _https
SECURE_HSTS_SECONDS = 31_536_000 if _https else 0
# Neighbours under the same domain are not ours to lock to TLS: whoever owns the domain does that at its front.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SESSION_COOKIE_HTTPONLY = True
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = RUBATO_BODY_LIMIT_BYTES

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAdminUser"],
    "DEFAULT_SCHEMA_CLASS": "gateway.management_api.schema.ManagementSchema",
    "EXCEPTION_HANDLER": "gateway.management_api.errors.handle",
    "URL_FORMAT_OVERRIDE": None,  # ``format`` is a parameter of ours
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Rubato management API",
    "DESCRIPTION": "Projects, keys, members, usage, statements and the audit trail of one tenant.",
    "VERSION": "1",
    "SERVE_PUBLIC": True,
    "SCHEMA_PATH_PREFIX": "/v1/organization",
    "POSTPROCESSING_HOOKS": [],  # the library's own would give every closed list of words a made-up name
}

LOGGING = logs.configuration(is_json=os.environ.get("LOG_FORMAT") == "json", level=os.environ.get("LOG_LEVEL", "INFO"))
