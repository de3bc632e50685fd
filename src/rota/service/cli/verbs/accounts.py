"""rota user, token, secret, webhook, login, logout, ui, audit: accounts, rights and write-only secrets."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from rota.service.cli.flags import DEFAULT_FLAGS, Flags
from rota.service.cli.output import Table, Terminal
from rota.service.cli.verbs.formatting import ago_s, clock_time, not_understood, shortened
from rota.service.models.jobs import JobDocument
from rota.spec.errors import BadInput, UnknownName
from rota.spec.resources import counted


def user(
    action: Annotated[str, Parameter(help="create, rm or ls; default: who you are.")] = "",
    name: Annotated[str, Parameter(help="The user.")] = "",
    *,
    role: Annotated[str, Parameter(help="viewer, user, queue-admin or admin; none takes the role away.")] = "user",
    queue: Annotated[str, Parameter(help="The queue it is for, with all below; default: all queues.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show who you are, or let users do things; create again gives one more role.

    Examples
    --------
    rota user create ann --role user --queue research

    rota user ls
    """
    if not action or action == "ls":
        return flags.answer(lambda client: client.accounts.users() if action else client.accounts.whoami(), USERS)
    terminal = flags.terminal()
    with flags.client() as client:
        if not name or action not in ("create", "rm"):
            raise not_understood(["user", action, name], {"create": "NAME", "ls": "", "rm": "NAME"})
        if action == "rm":
            done = client.accounts.remove_user(name)
        else:
            known = next((one for one in client.accounts.users()["items"] if one["name"] == name), None)
            grants = {one["queue"]: one["role"] for one in (known or {"grants": []})["grants"]} | {queue: role}
            kept = [(path, word) for path, word in grants.items() if word != "none"]
            done = client.accounts.put_user(name, kept) if kept else client.accounts.remove_user(name)
    terminal.show(done, lambda term: USERS(term, done))
    if live := done.get("live"):
        has = f"{counted(len(live), 'job')} that {'has' if len(live) == 1 else 'have'} not ended"
        terminal.note(f"{name} has {has} ({shortened(live, 8)}): they run on; to end them: rota stop JOB")
    for job in done.get("jobs", ()):
        terminal.note(f"{job} names secrets that are gone now: it cannot start again")
    return 0


def _one_or_many(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The rows of a list, or of a document that is a row itself."""
    return document.get("items", [document])


def _may(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{grant['role']} of {grant['queue'] or 'all queues'}" for grant in one["grants"]) or "nothing"


USERS = Table(
    columns={"USER": "name", "MAY": _may},
    rows=_one_or_many,
)


def token(
    action: Annotated[str, Parameter(help="create, ls or rm; default: print the token in use.")] = "",
    id_: Annotated[str, Parameter(name="ID", help="What rm takes: the id of the token.")] = "",
    *,
    user: Annotated[str, Parameter(help="Whose; default: your own.")] = "",
    name: Annotated[str, Parameter(help="What it is for.")] = "",
    role: Annotated[str, Parameter(help="At most this role; machine: may join machines, and no more.")] = "",
    queue: Annotated[str, Parameter(help="For this queue and those below alone.")] = "",
    ttl: Annotated[str, Parameter(help="Lifetime, e.g. 30d; default: until it is revoked.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Print the token in use, or make, list and revoke tokens. A new token is shown once.

    Examples
    --------
    rota token create --user ann --role user --ttl 30d

    curl -H "Authorization: Bearer $(rota token)" http://127.0.0.1:7700/api/v1/jobs
    """
    if not action:
        return flags.show(lambda: _in_use(flags), lambda term, document: term.line(document["token"]))
    terminal = flags.terminal()
    if action not in ("create", "ls", "rm") or (action == "rm" and not id_):
        raise not_understood(["token", action, id_], {"create": "", "ls": "", "rm": "ID"})
    with flags.client() as client:
        if action == "create":
            made = client.accounts.make_token(user=user, name=name, role=role, queue=queue, ttl_s=ago_s(ttl))
            terminal.show(made, lambda term: term.line(made.get("token", "")))
            terminal.note(f"token {made['id']} of {made['user']}; it is not shown again")
            if role and role != made["role"]:
                terminal.note(f"it gives {_may(made)}: no token gives more than its user and the token in use have")
            return 0
        done = client.accounts.tokens() if action == "ls" else client.accounts.revoke_token(id_)
    terminal.show(done, lambda term: TOKENS(term, done))
    return 0


def _in_use(flags: Flags) -> dict[str, str]:
    from rota.service.http import find_service

    address = find_service(flags.server, flags.token)
    if not address.token:
        raise UnknownName(f"no token in {address.home}", hint="'rota up' makes one")
    return {"kind": "Token", "token": address.token, "url": address.url}


TOKENS = Table(
    columns={
        "ID": "id",
        "USER": "user",
        "NAME": "name",
        "MAY": _may,
        "MADE": lambda one: clock_time(one["made_at"]),
        "ENDS": lambda one: "revoked" if one["revoked"] else clock_time(one["expires_at"]),
    },
    rows=_one_or_many,
    empty="no tokens but the first one",
)


def secret(
    action: Annotated[str, Parameter(help="set, ls or rm; default: ls.")] = "ls",
    name: Annotated[str, Parameter(help="The name of the variable that jobs see.")] = "",
    *,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Store write-only secrets for your jobs. The value is read from stdin, or prompted for.

    A job names them: 'secrets: [API_KEY]'.

    Examples
    --------
    rota secret set API_KEY < key.txt
    """
    if action not in ("set", "ls", "rm") or (action != "ls" and not name):
        if action in ("get", "show", "cat"):
            hint = "rota secret ls lists the names; a job that names it ('secrets: [NAME]') sees the value"
            raise BadInput(f"rota secret {action} {name}".rstrip() + ": a secret cannot be read back", hint=hint)
        raise not_understood(["secret", action, name], {"set": "NAME", "ls": "", "rm": "NAME"})
    if action == "ls":
        return flags.answer(lambda client: client.accounts.secrets(), SECRETS)
    if action == "rm":
        return flags.answer(lambda client: client.accounts.remove_secret(name), _secret_line)
    value = _asked(f"value of {name}")
    return flags.answer(lambda client: client.accounts.set_secret(name, value), _secret_line)


SECRETS = Table(columns={"SECRET": "name"}, empty="no secrets")


def _secret_line(term: Terminal, document: Mapping[str, Any]) -> None:
    term.line(f"{document['name']}: {'removed' if document['removed'] else 'set'}")


def _asked(what: str) -> str:
    """A line that is not echoed, or all of stdin; without its last line break."""
    if sys.stdin.isatty():
        from getpass import getpass

        return getpass(f"{what}: ")
    return sys.stdin.read().removesuffix("\n")


def login(
    url: Annotated[str, Parameter(help="Address of the service.")],
    *,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Use the service at an address from now on. The token is read from stdin, or asked for.

    Examples
    --------
    rota login http://10.0.0.5:7700 < token.txt
    """
    from rota.service.client import Client
    from rota.service.http import save_login

    given = flags.token or _asked("token").strip()
    with Client(url, given) as client:
        me = client.accounts.whoami()
    path = save_login(url, given)
    document = {"kind": "Login", "url": url, "user": me["name"], "grants": me["grants"], "file": str(path)}
    terminal = flags.terminal()
    terminal.show(document, lambda term: USERS(term, me))
    terminal.note(f"kept in {path}; 'rota logout' forgets it")
    return 0


def ui(
    job: Annotated[str, Parameter(help="The job to show; default: the overview.")] = "",
    *,
    port: Annotated[str, Parameter(help="Open this port of the job: NAME, or ROLE/N:NAME of one instance.")] = "",
    print_: Annotated[bool, Parameter(name="--print", help="Print the address alone; open no browser.")] = False,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Open the page in the name of the token in use. The address holds a code that works once, for ten minutes.

    Examples
    --------
    rota ui

    rota ui big-1 --print

    rota ui lab-1 --port notebook
    """
    if port and not job:
        raise BadInput("--port needs the job that has it", hint="rota ui JOB --port NAME")
    terminal = flags.terminal()
    with flags.client() as client:
        page = f"&next={quote(_page_of(client.job(job), port))}" if job else ""
        document = client.accounts.login_code()
        address = f"{client.url}/login?code={document['code']}{page}"
    document = document | {"url": address}
    terminal.show(document, lambda term: term.line(address))
    if not print_ and sys.stdout.isatty() and not _browse(address):
        terminal.note("no browser was found here: open the address above, once, in one that reaches the service")
    return 0


def _page_of(job: JobDocument, port: str) -> str:
    """Where the page shows a job, or opens a port of it. Raises UnknownName."""
    if not port:
        return f"/jobs/{job['id']}"
    instance, _, name = port.rpartition(":")
    found = {f"{one['instance']}:{key}": path for one in job["instances"] for key, path in one["ports"].items()}
    for key, path in found.items():
        if key == port or (not instance and key.rpartition(":")[2] == name):
            return path
    hint = f"it has {', '.join(found)}" if found else "its roles name none (ports: [notebook]), or do not run yet"
    raise UnknownName(f"{job['id']} has no port {port!r} now", hint=hint)


def _browse(address: str) -> bool:
    """Show an address in the browser of this desktop; False where there is none, or only one of text."""
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return type(browser) not in (webbrowser.GenericBrowser, webbrowser.Elinks) and browser.open(address)


def logout(*, flags: Flags = DEFAULT_FLAGS) -> int:
    """Forget the service of the last login; this machine's own is used again.

    Examples
    --------
    rota logout
    """
    from rota.service.http import forget_login

    def show(term: Terminal, document: Mapping[str, Any]) -> None:
        term.line(f"logged out of {document['url']}" if document["url"] else "no login")

    return flags.show(lambda: {"kind": "Login", "url": forget_login()}, show)


def webhook(
    action: Annotated[str, Parameter(help="add, ls or rm; default: ls.")] = "ls",
    what: Annotated[str, Parameter(help="The address for add, the id for rm.")] = "",
    *,
    on: Annotated[
        list[str] | None, Parameter(help="started, healed, preempted, failed, finished, drained, lost, replaced.")
    ] = None,
    queue: Annotated[str, Parameter(help="Only of jobs of this queue and those below.")] = "",
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Send signed POSTs (webhooks) on job events; for admins.

    Examples
    --------
    rota webhook add https://chat.example.org/hook --on failed --on healed
    """
    terminal = flags.terminal()
    if action not in ("add", "ls", "rm") or (action != "ls" and not what):
        raise not_understood(["webhook", action, what], {"add": "URL", "ls": "", "rm": "ID"})
    with flags.client() as client:
        if action == "add":
            made = client.accounts.make_webhook(what, on=on or (), queue=queue)
            terminal.show(made, lambda term: term.pairs([("id", made["id"]), ("secret", made.get("secret"))]))
            terminal.note("notices are signed with this secret; it is not shown again")
            return 0
        done = client.accounts.webhooks() if action == "ls" else client.accounts.remove_webhook(what)
    terminal.show(done, lambda term: WEBHOOKS(term, done))
    return 0


WEBHOOKS = Table(
    columns={
        "ID": "id",
        "URL": "url",
        "EVENTS": lambda one: ", ".join(one["on"]) or "all",
        "QUEUE": "queue",
    },
    rows=_one_or_many,
    empty="no webhooks",
)


def audit(
    *,
    user: Annotated[str, Parameter(help="Only what this user asked for.")] = "",
    limit: Annotated[int, Parameter(help="Maximum number of entries to list.")] = 50,
    flags: Flags = DEFAULT_FLAGS,
) -> int:
    """Show who asked for which change, from where, and what came of it; the newest first. For admins.

    Examples
    --------
    rota audit --user ann
    """
    return flags.answer(lambda client: client.accounts.audit(user=user, limit=limit), AUDIT)


def _outcome(line: Mapping[str, Any]) -> str:
    return f"{line['status'] or ''}{' (dry run)' if line.get('dry_run') else ''}".strip()


AUDIT = Table(
    columns={
        "AT": lambda one: clock_time(one["at"]),
        "USER": "user",
        "FROM": "address",
        "METHOD": "method",
        "PATH": "path",
        "STATUS": _outcome,
        "WHAT": lambda one: one.get("change") or one.get("command") or "",
    },
    empty="no changes recorded",
    extra=("FROM",),
    sparse=("WHAT",),
)
