"""A private RabbitMQ: the broker of production, as a child process with ports and a data folder of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import subprocess
from pathlib import Path

from spotgrpo.shared.errors import BrokerUnavailable, ConfigError
from spotgrpo.shared.services.processes import (
    LOOPBACK,
    Child,
    ChildEnded,
    find_program,
    tail,
)
from spotgrpo.shared.services.server import PrivateServer

USER = "spotgrpo"
# The scripts themselves: what distributions put on PATH are wrappers that change the user.
SCRIPT_GLOBS = (
    "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server",
    "/opt/rabbitmq/sbin/rabbitmq-server",
    "/opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server",
    "/usr/local/opt/rabbitmq/sbin/rabbitmq-server",
)
STOP_GRACE_S = 15.0
CTL_TIMEOUT_S = 60.0
GREETING_TIMEOUT_S = 2.0
AMQP_HEADER = b"AMQP\x00\x00\x09\x01"


class PrivateRabbitMQ(PrivateServer):
    """A RabbitMQ server that this process owns: on loopback only, with a password of its own.

    A stopped or killed server starts again with the same messages, and, from the same object, on the same port.
    Not safe to use from several threads; `start` and `restart` need the main thread.

    Args:
        folder: its data, logs and password; made if missing, reused if not.
        heartbeat_s: heartbeat that the server asks for, in seconds; none: its default of 60.
        consumer_timeout_s: how long a delivery may stay unacked; none: its default of 1800.
        channel_tick_s: how often that is checked; none: its default of 60.
        start_deadline_s: how long it may take to come up.
    """

    _stop_grace_s = STOP_GRACE_S
    _port_count = 3
    _secrets_file = "broker.json"
    _unavailable = BrokerUnavailable

    def __init__(
        self,
        folder: Path,
        *,
        heartbeat_s: int | None = None,
        consumer_timeout_s: float | None = None,
        channel_tick_s: float | None = None,
        start_deadline_s: float = 60.0,
    ) -> None:
        super().__init__(folder)
        self._heartbeat_s = heartbeat_s
        self._consumer_timeout_s = consumer_timeout_s
        self._channel_tick_s = channel_tick_s
        self._start_deadline_s = start_deadline_s
        self._epmd: Child | None = None

    @property
    def url(self) -> str:
        """amqp:// URL with user and password. Known once it was started."""
        return f"amqp://{USER}:{self._secrets['password']}@{LOOPBACK}:{self.port}/%2F"

    def ctl(self, *args: str) -> str:
        """Run ``rabbitmqctl`` on this server (0.5 s and more) and return what it prints.

        Raises:
            BrokerUnavailable: it failed or took longer than a minute; the message carries what it said.
        """
        command = [str(self._installed.with_name("rabbitmqctl")), "-q", "-n", self._node, *args]
        try:
            done = subprocess.run(
                command,
                env=self._env(),
                capture_output=True,
                text=True,
                check=True,
                timeout=CTL_TIMEOUT_S,
            )
        except subprocess.CalledProcessError as exc:
            raise BrokerUnavailable(f"rabbitmqctl {' '.join(args)}: {exc.stderr.strip()}") from exc
        except subprocess.TimeoutExpired as exc:
            raise BrokerUnavailable(
                f"rabbitmqctl {' '.join(args)}: no answer in {CTL_TIMEOUT_S:g} s"
            ) from exc
        return done.stdout

    def write_tables(self) -> None:
        """Write to disk the names of new quorum queues, which RabbitMQ 3.10 otherwise does within some 3 s.

        Killed before that, it brings such a queue back without a leader and without its messages, for good, though
        it had confirmed them. Call it before a kill that is not meant to show this.

        Raises:
            BrokerUnavailable: as ``ctl``.
        """
        self.ctl("eval", "[ok = dets:sync(Table) || Table <- dets:all()].")

    @property
    def _node(self) -> str:
        return f"{self._secrets['node']}@localhost"

    def _find(self) -> Path:
        return find_server()

    @staticmethod
    def _draw_secrets() -> dict[str, str]:
        return {
            "password": secrets.token_urlsafe(24),
            "node": f"spotgrpo_{secrets.token_hex(4)}",
            "cluster_name": f"spotgrpo-{secrets.token_hex(8)}",
        }

    def _launch(self) -> None:
        self._write_config()
        self._start_children()

    def _tidy(self) -> None:
        """The port mapper after the server that is registered with it."""
        if self._epmd is not None:
            self._epmd.stop(STOP_GRACE_S)
        self._epmd = None

    def _why(self, error: ChildEnded) -> str:
        return f"{error}\n{self._log_tail()}"

    def _start_children(self) -> None:
        env, lock = self._env(), self._lock.fd
        if self._epmd is None or not self._epmd.is_running:
            epmd = find_program("epmd", *_erlang_folders())
            if epmd is None:
                raise ConfigError("PATH", os.environ.get("PATH"), "epmd of Erlang is not there")
            command: list[str | Path] = [epmd, "-port", str(self._ports[2]), "-address", LOOPBACK]
            self._epmd = Child("epmd", command, env, self.folder / "epmd.log", lock)
            self._epmd.wait_until(lambda: _listens(self._ports[2]), 10)
        self._server = Child("rabbitmq", [self._installed], env, self._stdout, lock)
        if not self._server.wait_until(self._greets, self._start_deadline_s):
            raise BrokerUnavailable(
                f"rabbitmq did not come up in {self._start_deadline_s:g} s\n{self._log_tail()}"
            )

    @property
    def _stdout(self) -> Path:
        return self.folder / "rabbitmq.out"

    def _log_tail(self) -> str:
        return "\n".join(map(tail, [self._stdout, self.folder / "log" / f"{self._node}.log"]))

    def _greets(self) -> bool:
        """Whether the listener is this server and not another that has the port."""
        return self._secrets["cluster_name"].encode() in _greeting(self.port)

    def _write_config(self) -> None:
        lines = {
            "listeners.tcp.1": f"{LOOPBACK}:{self.port}",
            "default_user": USER,
            "default_pass": self._secrets["password"],
            "cluster_name": self._secrets["cluster_name"],
            "disk_free_limit.absolute": "200MB",
            # Quorum queues keep what the write-ahead log covers in memory: 0.3 GB instead of 1.2 GB.
            "raft.wal_max_size_bytes": "64000000",
            "log.console": "false",
        }
        if self._heartbeat_s is not None:
            lines["heartbeat"] = str(self._heartbeat_s)
        if self._consumer_timeout_s is not None:
            lines["consumer_timeout"] = str(round(self._consumer_timeout_s * 1000))
        advanced = "[]."
        if self._channel_tick_s is not None:
            advanced = (
                f"[{{rabbit,[{{channel_tick_interval,{round(self._channel_tick_s * 1000)}}}]}}]."
            )
        for folder in ("home", "mnesia", "log"):
            (self.folder / folder).mkdir(exist_ok=True)
        config = self.folder / "rabbitmq.conf"
        config.touch(0o600)
        config.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
        (self.folder / "advanced.config").write_text(advanced)
        (self.folder / "enabled_plugins").write_text("[].\n")

    def _env(self) -> dict[str, str]:
        kept = {
            key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL", "TZ") if key in os.environ
        }
        return kept | {
            "HOME": str(self.folder / "home"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_DIST_PORT": str(self._ports[1]),
            "ERL_EPMD_PORT": str(self._ports[2]),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # Makes the script become the Erlang machine, so that the child's pid is the broker's.
            "RUNNING_UNDER_SYSTEMD": "true",
        }


def find_server() -> Path:
    """Return the script that starts RabbitMQ as the calling user.

    Raises:
        ConfigError: it is not installed.
    """
    for pattern in SCRIPT_GLOBS:
        if found := sorted(Path("/").glob(pattern.lstrip("/"))):
            return found[-1]
    on_path = shutil.which("rabbitmq-server")
    if on_path and Path(on_path).resolve().name == "rabbitmq-server":
        return Path(on_path).resolve()
    raise ConfigError(
        "broker.url",
        None,
        "no RabbitMQ is installed to run privately; `apt-get install rabbitmq-server`, "
        "or set SPOTGRPO_BROKER__URL to a broker of yours",
    )


def _erlang_folders() -> list[Path]:
    return [*sorted(Path("/usr/lib/erlang").glob("erts-*/bin"), reverse=True), Path("/usr/bin")]


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


def _greeting(port: int) -> bytes:
    """Return the first AMQP frame that the server sends (Connection.Start); empty when it sends none."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=GREETING_TIMEOUT_S) as link:
            link.settimeout(GREETING_TIMEOUT_S)
            link.sendall(AMQP_HEADER)
            with link.makefile("rb") as stream:
                head = stream.read(7)
                if len(head) < 7:
                    return b""
                (size,) = struct.unpack_from(">I", head, 3)
                return stream.read(min(size, 1 << 16))
    except OSError:
        return b""
