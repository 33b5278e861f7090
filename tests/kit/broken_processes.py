"""Servers that break a rule which only a process can break.

As in broken_servers.py, a mistake stands in the place of one function of
sbus.py, or beside it.

    python3 broken_processes.py NAME OPTION...   run one of them all
"""

# mypy: allow-untyped-defs
# A mistake has no types, since what it gets is of a copy that has none.

from __future__ import annotations

import atexit
import contextlib
import os
import re
import resource
import signal
import socket
import stat
import sys
import time

import broken_logs
import broken_servers
import broken_traffic
from broken_servers import Broken, collect

BROKEN: list[Broken] = []
broken = collect(BROKEN)


@broken("end-by-sigterm", "Server._finish")
def status_of_the_end_is_1(finish, server):
    finish(server)
    os._exit(1)


@broken("end-by-sigint", "STOP_SIGNALS")
def sigint_is_ignored(signals):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return [one for one in signals if one.name != "SIGINT"]


@broken("end-by-sighup", "STOP_SIGNALS")
def sighup_kills(signals):
    return [one for one in signals if one.name != "SIGHUP"]


@broken("socket-is-removed", "remove")
def socket_stays(remove, *args):
    pass


@broken("what-took-its-place-is-kept", "is_in_place")
def whatever_is_in_its_place_is_removed(is_in_place, *args):
    return True


@broken("socket-that-took-its-place-is-kept", "is_in_place")
def every_socket_in_its_place_is_removed(is_in_place, descriptor, path):
    return stat.S_ISSOCK(os.lstat(path).st_mode)


@broken("end-delivers-what-was-read", "Server._finish")
def backlogs_are_lost_at_the_end(finish, server):
    for client in server.bus.clients.values():
        client.backlog.clear()
    finish(server)


@broken("end-does-not-wait-for-a-reader", "STOP_SECONDS_MAX")
def the_end_waits_for_a_reader(seconds):
    return 99.0


@broken("standard-output-is-closed", "redirect")
def standard_output_stays_open(redirect, descriptor, *args):
    if descriptor != 1:
        redirect(descriptor, *args)


@broken("mode-of-the-socket", "bind_path")
def everybody_may_connect(bind_path, listener, path, mode, replace):
    return bind_path(listener, path, 0o777, replace)


@broken("mode-from-the-first-moment", "bind_path")
def mode_is_set_too_late(bind_path, listener, path, mode, replace):
    bound = bind_path(listener, path, 0o777, replace)
    os.chmod(path, mode)
    return bound


@broken("mode-for-the-group", "bind_path")
def group_may_not_connect(bind_path, listener, path, mode, replace):
    return bind_path(listener, path, mode & 0o707, replace)


@broken("mode-for-others", "bind_path")
def others_may_not_connect(bind_path, listener, path, mode, replace):
    return bind_path(listener, path, mode & 0o770, replace)


@broken("mode-for-all", "main")
def only_the_first_of_a_bundle_counts(main, options):
    return main([re.sub("^(-[a-z])[a-z]+$", r"\1", one) for one in options])


@broken("second-server-at-a-path", "bind_path")
def live_server_loses_its_place(bind_path, listener, path, mode, replace):
    if os.path.exists(path) and not os.path.isfile(path):
        os.unlink(path)
    return bind_path(listener, path, mode, replace)


@broken("file-at-the-path", "bind_path")
def file_is_replaced(bind_path, listener, path, mode, replace):
    if os.path.isfile(path):
        os.unlink(path)
    return bind_path(listener, path, mode, replace)


@broken("stale-socket-at-the-path", "bind_path")
def stale_socket_is_always_replaced(bind_path, listener, path, mode, replace):
    return bind_path(listener, path, mode, True)


@broken("live-server-is-not-replaced", "is_stale")
def every_socket_is_stale(is_stale, path):
    return True


@broken("stale-socket-is-replaced", "is_stale")
def no_socket_is_stale(is_stale, path):
    return False


@broken("what-is-not-stale-is-kept", "make_way")
def every_file_is_replaced(make_way, path, replace):
    if replace and os.path.isfile(path):
        os.unlink(path)
    make_way(path, replace)


@broken("wrong-options", "OptionParser.error")
def wrong_option_has_status_1(error, *args):
    sys.exit(1)


@broken("what-is-not-stale-is-kept", "make_way")
def link_to_an_empty_file_is_replaced(make_way, path, replace):
    if replace and os.path.islink(path):
        os.unlink(path)
    make_way(path, replace)


@broken("wrong-options", "limit")
def what_follows_a_number_is_ignored(limit, is_whole, text):
    return limit(is_whole, re.sub("(?<=[0-9])[a-z].*", "", text))


@broken("wrong-options", "prefix")
def beginning_of_a_prefix_may_be_another(prefix, text):
    return prefix(text.replace("!/crew/", "!/cred/"))


@broken("wrong-options", "prefix")
def prefix_may_end_in_a_slash(prefix, text):
    return prefix(text.rstrip("/"))


@broken("wrong-options", "prefix")
def prefix_may_lack_a_number(prefix, text):
    return prefix(text if text.count("/") > 3 else f"{text}/0")


@broken("wrong-options", "user_id")
def unknown_user_is_nobody(user_id, text):
    return user_id(text if text.isdigit() else "nobody")


@broken("wrong-options", "user_id")
def numbers_of_users_wrap_around(user_id, text):
    return user_id(f"{int(text) % (1 << 64)}" if text.isdigit() else text)


@broken("wrong-options", "parse_options")
def beginning_of_a_long_name_is_enough(parse_options, arguments):
    return parse_options([re.sub("^--verb$", "-v", one) for one in arguments])


@broken("wrong-options", "parse_options")
def further_words_are_ignored(parse_options, arguments):
    return parse_options([one for one in arguments if one != "surplus"])


@broken("wrong-options", "parse_options")
def option_may_lack_its_value(parse_options, arguments):
    if arguments[-1] == "--max-patterns":
        arguments.pop()
    return parse_options(arguments)


@broken("long-names-of-options", "parse_options")
def long_name_of_others_is_ignored(parse_options, arguments):
    options = parse_options(arguments)
    options.others &= "--others" not in arguments
    return options


@broken("wrong-addresses", "open_endpoint")
def wrong_address_has_status_3(open_endpoint, *args):
    try:
        return open_endpoint(*args)
    except Exception:
        sys.exit(3)


@broken("wrong-addresses", "open_regular")
def trace_that_cannot_be_opened_is_left_out(open_regular, path, *flags):
    try:
        return open_regular(path, *flags)
    except Exception:
        return -1


@broken("wrong-addresses", "limits_of")
def packet_size_is_lowered_in_silence(limits_of, options):
    options.max_packet = min(options.max_packet, 1 << 18)
    return limits_of(options)


@broken("wrong-addresses", "abstract_name")
def what_is_no_digit_is_left_out(abstract_name, address):
    return abstract_name(address.replace("xy", ""))


@broken("wrong-addresses", "open_endpoint")
def closed_descriptor_is_reported_in_two_lines(open_endpoint, address, *args):
    if address == "/dev/fd/999":
        os.write(2, b"sbusd: what a pity\n")
    return open_endpoint(address, *args)


@broken("inherited-socket-that-does-not-listen", "open_endpoint")
def inherited_socket_is_to_listen(open_endpoint, address, *args):
    if address.startswith("/dev/fd/"):
        with socket.socket(fileno=os.dup(int(address[8:]))) as listener:
            kind = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            listener.getsockopt(*kind) or sys.exit(1)
    return open_endpoint(address, *args)


@broken("inherited-socket-that-does-not-listen", "open_endpoint")
def inherited_socket_is_removed(open_endpoint, *args):
    endpoint = open_endpoint(*args)
    atexit.register(os.unlink, endpoint.listener.getsockname())
    return endpoint


@broken("inherited-socket-of-another-kind", "inherit")
def every_socket_will_do(inherit, address):
    os._exit(0)


@broken("socket-that-is-handed-over", "default_address")
def the_socket_of_any_process_will_do(default_address, *args):
    os.environ["LISTEN_PID"] = str(os.getpid())
    return default_address(*args)


@broken("socket-that-is-handed-over", "Server.accept")
def accept_waits_for_another(accept, server):
    server.listener.setblocking(True)
    accept(server)


@broken("socket-that-is-handed-over", "default_address")
def first_of_two_sockets_will_do(default_address):
    os.environ["LISTEN_FDS"] = os.environ["LISTEN_FDS"][:1] and "1"
    return default_address()


@broken("socket-that-is-handed-over", "default_address")
def no_socket_is_one(default_address):
    os.environ["LISTEN_FDS"] = os.environ["LISTEN_FDS"] or "1"
    return default_address()


@broken("owner-who-is-not-root", "Bus.stats")
def root_is_told_of_itself_alone(stats, bus, client):
    client.user.is_privileged = client.user.uid == bus.owner_uid
    return stats(bus, client)


@broken("numbers-of-many-users", "STATS_USERS_MAX")
def numbers_are_of_a_hundred_users(count):
    return 100


@broken("random-abstract-name", "abstract_name")
def random_name_is_always_the_same(abstract_name, address):
    if address == "/dev/unix/abstract":
        address += "/00" + f"{os.getppid():08x}"
    return abstract_name(address)


@broken("abstract-name-is-filled-up", "abstract_name")
def short_name_is_refused(abstract_name, address):
    return abstract_name(address) if len(address) > 200 else sys.exit(1)


@broken("abstract-name-is-filled-up", "abstract_name")
def longest_name_is_refused(abstract_name, address):
    return abstract_name(address) if len(address) < 200 else sys.exit(1)


@broken("servers-that-start-at-once", "bind_path")
def stale_socket_is_seen_too_early(bind_path, listener, path, mode, replace):
    is_there = os.path.exists(path)
    time.sleep(0.5)  # until the others have looked, too
    if replace and is_there:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return bind_path(listener, path, mode, replace)


@broken("servers-that-start-at-once", "bind_path")
def none_is_left(bind_path, listener, path, mode, replace):
    if os.path.exists(path):
        sys.exit(1)
    return bind_path(listener, path, mode, replace)


@broken("readiness-is-told", "open_endpoint")
def readiness_is_told_too_early(open_endpoint, *args):
    import sbus

    sbus.notify_ready()
    time.sleep(0.2)
    return open_endpoint(*args)


@broken("readiness-is-told", "notify_ready")
def another_thing_is_told(notify_ready):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        name = os.environ.get("NOTIFY_SOCKET")
        if name:
            notifier.sendto(b"READY=0", name)


@broken("descriptors-are-made-use-of", "limits_of")
def soft_limit_stays(limits_of, options):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = limits_of(options)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return limits


@broken("descriptors-are-made-use-of", "limits_of")
def limit_of_clients_is_not_lowered(limits_of, options):
    limits = limits_of(options)
    limits.max_clients = options.max_clients
    return limits


@broken("descriptors-are-made-use-of", "limits_of")
def an_eighth_of_few_descriptors_is_kept(limits_of, options):
    limits = limits_of(options)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits.max_clients = min(limits.max_clients + 16, hard * 7 // 8)
    return limits


@broken("half-of-the-descriptors-for-a-user", "limits_of")
def one_user_may_have_all_descriptors(limits_of, options):
    limits = limits_of(options)
    limits.max_user_clients = options.max_user_clients
    return limits


@broken("closed-standard-streams", "Server._admit")
def client_becomes_standard_input(admit, server, wire):
    os.dup2(wire.fileno(), 0)
    admit(server, wire)


@broken("numbers-without-streams", "user_id")
def numbers_of_users_are_names(user_id, text):
    return user_id(f"{text} ")


@broken("numbers-without-streams", "limits_of")
def limits_are_the_default_without_streams(limits_of, options):
    if os.readlink("/proc/self/fd/1") == os.devnull:
        options.max_patterns = 1024
    return limits_of(options)


@broken("closed-standard-streams", "open_endpoint")
def abstract_listener_is_standard_error(open_endpoint, address, *args):
    endpoint = open_endpoint(address, *args)
    if address.startswith("/dev/unix/abstract"):
        os.dup2(endpoint.listener.fileno(), 2)
    return endpoint


@broken("daemon-with-a-pid-file", "remove")
def pid_file_of_a_daemon_stays(remove, descriptor, path):
    if stat.S_ISSOCK(os.lstat(path).st_mode):
        remove(descriptor, path)


@broken("daemon-with-a-pid-file", "bind_path")
def group_of_a_daemon_may_connect(bind_path, listener, path, mode, replace):
    return bind_path(listener, path, mode | 0o070, replace)


@broken("relative-names-of-a-daemon", "absolute")
def relative_names_stay(absolute, path):
    return path


@broken("relative-names-of-a-daemon", "absolute")
def names_that_begin_with_a_dot_stay(absolute, path):
    return path if path.startswith(".") else absolute(path)


@broken("daemon-with-a-pid-file", "go_to_background")
def rest_of_a_longer_number_stays(go_to_background, *args):
    os.ftruncate = lambda *_: None
    return go_to_background(*args)


@broken("daemon-with-a-pid-file", "go_to_background")
def command_returns_too_early(go_to_background, *args):
    if os.fork():
        os._exit(0)
    time.sleep(0.3)
    return go_to_background(*args)


@broken("daemon-with-a-pid-file", "is_alive")
def every_process_is_alive(is_alive, pid):
    return True


@broken("daemon-without-its-terminal", "obey_signals")
def sighup_ends_a_daemon(obey_signals, server, is_daemon):
    obey_signals(server, False)


@broken("daemon-without-its-terminal", "redirect")
def daemon_keeps_its_standard_error(redirect, descriptor, *args):
    if descriptor != 2 or args:
        redirect(descriptor, *args)


@broken("pid-file-that-took-its-place-is-kept", "is_in_place")
def whatever_pid_file_is_there_is_removed(is_in_place, *args):
    return True


@broken("what-is-no-pid-file-is-kept", "is_alive")
def no_process_is_alive(is_alive, pid):
    return False


@broken("daemon-without-its-terminal", "go_to_background")
def daemon_stays_in_its_session(go_to_background, *args):
    os.setsid = lambda: None
    return go_to_background(*args)


@broken("daemon-without-its-terminal", "redirect")
def daemon_keeps_its_standard_input(redirect, descriptor, *args):
    if descriptor:
        redirect(descriptor, *args)


@broken("what-is-no-pid-file-is-kept", "open_pid_file")
def pid_file_is_replaced_like_a_socket(open_pid_file, path):
    if "-r" in sys.argv:
        os.unlink(path)
    return open_pid_file(path)


@broken("what-is-no-pid-file-is-kept", "open_pid_file")
def no_pid_file_where_there_is_no_directory(open_pid_file, path):
    return os.memfd_create("") if "none" in path else open_pid_file(path)


@broken("what-is-no-pid-file-is-kept", "open_pid_file")
def socket_is_left_for_want_of_a_pid_file(open_pid_file, path):
    try:
        return open_pid_file(path)
    except Exception:
        os._exit(1)


@broken("sigusr1-is-no-end", "log_stats")
def nothing_is_logged_on_sigusr1(log_stats, server):
    pass


@broken("sigusr1-is-no-end", "obey_signals")
def sigusr1_kills(obey_signals, *args):
    obey_signals(*args)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@broken("ignored-sighup-stays-ignored", "obey_signals")
def sighup_is_never_ignored(obey_signals, *args):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    obey_signals(*args)


@broken("no-end-before-the-first-client", "Server.round")
def it_ends_when_nobody_has_come(go_round, server, *seconds_max):
    go_round(server, *seconds_max)
    if server.close_after_last and not server.bus.clients:
        server.stop()


@broken("end-with-the-last-client", "Server.disconnect")
def it_ends_with_the_first_to_leave(disconnect, server, *args):
    disconnect(server, *args)
    server.stop()


@broken("end-with-the-last-client", "Server.__init__")
def it_stays_when_all_have_gone(init, server, *args):
    init(server, *args)
    server.close_after_last = False


if __name__ == "__main__":
    import sbus

    name, *options = sys.argv[1:]
    every = BROKEN + broken_logs.BROKEN + broken_traffic.BROKEN
    every += broken_servers.BROKEN
    next(one for one in every if one.name == name).spoil(sbus)
    sys.exit(sbus.main(options))
