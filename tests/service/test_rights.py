"""Who may do what, by values: tokens, sessions, codes, limits of wrong tokens, roles on subtrees of the queues."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.runtime.random import SeededRandom
from rota.service.accounts import LOCAL, REDACTED, AccountBook, Caller, Redactor, Token, UserRole, is_below, narrower
from rota.service.rest import auth as auth_module
from rota.service.rest.auth import (
    CODE_TTL_S,
    CODES_OF_USER_MAX,
    CSRF_HEADER,
    FAILURES_MAX,
    FAILURES_WINDOW_S,
    SESSION_TTL_S,
    Auth,
    AuthRequest,
    digest_of,
    ensure_token,
    fresh_token,
)
from rota.spec.errors import BadInput, LimitExceeded, NotAllowed, NoToken, StoreCorrupt
from rota.spec.events import JobQueued, Record, TokenMade, TokenRevoked, UserChanged
from rota.testing.memory import VirtualClock

OWN = "rota_own_" + "s" * 40


def record(event: Any, at: float = 0.0) -> Record:
    return Record(number=1, job=None, seq=0, at=at, event=event)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start_s=1000.0)


@pytest.fixture
def auth(clock: VirtualClock) -> Auth:
    made = Auth.of(OWN, clock=clock, random_source=SeededRandom(1), hosts=frozenset({"here", "::1"}))
    made.accounts.apply(record(UserChanged(name="ann", grants=(("team", "queue-admin"), ("open", "viewer")))))
    return made


def asked(
    token: str = "", *, method: str = "GET", cookie: str = "", address: str = "1.2.3.4", **headers: str
) -> AuthRequest:
    found = {"host": "here:7700", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if token:
        found["authorization"] = f"Bearer {token}"
    return AuthRequest(method=method, headers=found, cookie=cookie, address=address)


def token_for(auth: Auth, caller: Caller | None = None, **how: Any) -> tuple[TokenMade, str]:
    caller = caller or auth.check(asked(OWN))
    fields = {"user": "ann", "name": "t", "role": UserRole.ADMIN, "queue": "", "ttl_s": None, **how}
    made, whole = auth.make_token(caller, **fields)
    auth.accounts.apply(record(made, auth.clock.wall_s()))
    return made, whole


# -- proving who one is -----------------------------------------------------------------------------------------------


def test_the_token_of_the_installation_is_an_admin_of_everything(auth: Auth) -> None:
    assert auth.check(asked(OWN)) == Caller(user=LOCAL, by="token", token="own", grants=(("", UserRole.ADMIN),))
    assert auth.check(asked(f" {OWN} ")).user == LOCAL
    assert (
        auth.check(AuthRequest(method="GET", headers={"host": "here", "authorization": f"bearer {OWN}"})).user == LOCAL
    )


@pytest.mark.parametrize(
    "wrong", (OWN[:-1], OWN + "x", "rota_own", "rota__x", "own", f"{OWN} x", "other_own_" + "s" * 40)
)
def test_another_token_is_refused(auth: Auth, wrong: str) -> None:
    with pytest.raises(NoToken, match="invalid or expired token"):
        auth.check(asked(wrong))


def test_no_token_and_another_scheme_are_refused_without_being_counted(auth: Auth) -> None:
    for headers in ({}, {"authorization": "Bearer "}, {"authorization": f"Basic {OWN}"}):
        with pytest.raises(NoToken, match="no token"):
            auth.check(asked(**headers))
    assert auth._failures == {}


def test_a_token_of_a_user_has_the_roles_of_the_user_cut_to_its_own(auth: Auth) -> None:
    made, whole = token_for(auth, role=UserRole.USER, queue="team/a")
    caller = auth.check(asked(whole))
    assert (caller.user, caller.by, caller.token) == ("ann", "token", made.id)
    assert caller.grants == (("team/a", UserRole.USER),)
    _, all_of_it = token_for(auth)
    assert auth.check(asked(all_of_it)).grants == (("team", UserRole.QUEUE_ADMIN), ("open", UserRole.VIEWER))


def test_a_token_ends_at_its_time_and_when_it_is_revoked(auth: Auth, clock: VirtualClock) -> None:
    made, whole = token_for(auth, ttl_s=10.0)
    caller = auth.check(asked(whole))
    assert made.expires_at == clock.wall_s() + 10.0
    clock.advance(9.5)
    assert auth.renewed(caller) == caller
    clock.advance(0.5)
    with pytest.raises(NoToken):
        auth.check(asked(whole))
    with pytest.raises(NoToken, match="revoked, or it has expired"):
        auth.renewed(caller)
    other, second = token_for(auth)
    auth.accounts.apply(record(TokenRevoked(id=other.id), 7.0))
    assert auth.accounts.tokens[other.id].revoked_at == 7.0
    with pytest.raises(NoToken):
        auth.check(asked(second))


def test_again_gives_what_the_user_may_do_by_now(auth: Auth) -> None:
    caller = auth.check(asked(token_for(auth)[1]))
    auth.accounts.apply(record(UserChanged(name="ann", grants=(("x", "user"),))))
    assert auth.renewed(caller).grants == (("x", UserRole.USER),)
    auth.accounts.apply(record(UserChanged(name="ann", grants=())))
    assert (auth.renewed(caller).grants, "ann" in auth.accounts.users) == ((), False)


def test_wrong_tokens_of_an_address_are_limited_and_right_ones_are_not(auth: Auth, clock: VirtualClock) -> None:
    for _ in range(FAILURES_MAX):
        with pytest.raises(NoToken):
            auth.check(asked("wrong"))
    with pytest.raises(LimitExceeded, match=r"too many wrong tokens from 1\.2\.3\.4") as caught:
        auth.check(asked("wrong"))
    assert caught.value.hint == "wait 60 s"
    assert auth.check(asked(OWN)).user == LOCAL
    with pytest.raises(NoToken):
        auth.check(asked("wrong", address="5.6.7.8"))
    clock.advance(FAILURES_WINDOW_S)
    with pytest.raises(LimitExceeded):
        auth.check(asked("wrong"))
    clock.advance(0.1)
    with pytest.raises(NoToken):
        auth.check(asked("wrong"))


def test_addresses_with_wrong_tokens_are_kept_in_a_bounded_number_the_newest(
    auth: Auth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_module, "FAILING_MAX", 2)
    for address in ("a", "b", "a", "c"):
        with pytest.raises(NoToken):
            auth.check(asked("wrong", address=address))
    assert {address: len(times) for address, times in auth._failures.items()} == {"a": 2, "c": 1}


@pytest.mark.parametrize(
    ("host", "is_ours"),
    (("here", True), ("here:7700", True), ("HERE:1", True), ("[::1]:7700", True), ("[::1]", True), ("[::2]:1", False),
     ("there", False), ("", False), ("here.evil", False), ("evil:here", False)),
)  # fmt: skip
def test_a_request_names_a_host_of_ours(auth: Auth, host: str, is_ours: bool) -> None:
    if is_ours:
        assert auth.check(asked(OWN, host=host)).user == LOCAL
    else:
        with pytest.raises(NotAllowed, match="is not one of this service"):
            auth.check(asked(OWN, host=host))


def test_a_page_of_another_origin_may_not_ask(auth: Auth) -> None:
    assert auth.check(asked(OWN, origin="http://here:7700")).user == LOCAL
    for origin in ("http://here", "http://evil", "null"):
        with pytest.raises(NotAllowed, match="is another site than this service"):
            auth.check(asked(OWN, origin=origin))


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_code_opens_one_session_within_its_time(auth: Auth, clock: VirtualClock) -> None:
    caller = auth.check(asked(token_for(auth)[1]))
    code = auth.new_code(caller)
    cookie = auth.open_session(code)
    seen = auth.check(asked(cookie=cookie))
    assert (seen.user, seen.by, seen.grants) == ("ann", "cookie", caller.grants)
    with pytest.raises(BadInput, match="used or is too old"):
        auth.open_session(code)
    late = auth.new_code(caller)
    clock.advance(CODE_TTL_S)
    just = auth.open_session(late)
    assert just.split(".")[0] == str(int(clock.wall_s() + SESSION_TTL_S))
    later = auth.new_code(caller)
    clock.advance(CODE_TTL_S + 0.1)
    with pytest.raises(BadInput):
        auth.open_session(later)


def test_a_user_has_a_bounded_number_of_codes_and_takes_none_of_others(auth: Auth, clock: VirtualClock) -> None:
    mine, other = auth.check(asked(token_for(auth)[1])), auth.check(asked(OWN))
    kept = auth.new_code(other)
    codes = [auth.new_code(mine) for _ in range(CODES_OF_USER_MAX + 1)]
    with pytest.raises(BadInput):
        auth.open_session(codes[0])
    assert auth.open_session(codes[1]) and auth.open_session(kept)
    clock.advance(CODE_TTL_S)
    auth.new_code(mine)
    assert len(auth._codes) == 1


def test_a_session_ends_with_its_time_and_with_its_token(auth: Auth, clock: VirtualClock) -> None:
    made, _ = token_for(auth)
    cookie = auth.session_of(made.id)
    clock.advance(SESSION_TTL_S)
    assert auth.check(asked(cookie=cookie)).user == "ann"
    clock.advance(1.0)
    with pytest.raises(NoToken, match="has ended"):
        auth.check(asked(cookie=cookie))
    second = auth.session_of(made.id)
    auth.accounts.apply(record(TokenRevoked(id=made.id)))
    with pytest.raises(NoToken, match="has ended"):
        auth.check(asked(cookie=second))


def test_a_forged_session_is_not_known(auth: Auth) -> None:
    cookie = auth.session_of("own")
    expires, token_id, signature = cookie.split(".")
    no_number = f"x.{token_id}.{auth.sign(f'x.{token_id}')}"
    other = signature[:-1] + ("1" if signature[-1] == "0" else "0")
    for forged in (f"9{cookie}", f"{expires}.{token_id}.{other}", no_number, cookie[:-1], "a", "..",
                   f"{expires}.other.{signature}", f"{expires}.{token_id}.\xa0"):  # fmt: skip
        with pytest.raises(NoToken, match="not known"):
            auth.check(asked(cookie=forged))
    other = Auth.of("rota_own_" + "t" * 40, clock=auth.clock, random_source=auth.random_source, hosts=auth.hosts)
    with pytest.raises(NoToken, match="not known"):
        other.check(asked(cookie=cookie))


def test_a_change_from_a_page_needs_the_header_of_the_page(auth: Auth) -> None:
    cookie = auth.session_of("own")
    for method in ("GET", "HEAD", "OPTIONS"):
        assert auth.check(asked(cookie=cookie, method=method)).by == "cookie"
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        with pytest.raises(NotAllowed, match=f"needs the header {CSRF_HEADER}"):
            auth.check(asked(cookie=cookie, method=method))
        assert auth.check(asked(cookie=cookie, method=method, rota_csrf="1")).by == "cookie"
    assert auth.check(asked(OWN, cookie="wrong", method="POST")).by == "token"


# -- making and revoking tokens ---------------------------------------------------------------------------------------


def test_a_new_token_is_kept_as_its_digest_alone(auth: Auth) -> None:
    made, whole = token_for(auth, name="ci", role=UserRole.USER, queue="team")
    assert (made.digest, made.id, made.by) == (digest_of(whole), whole.split("_")[1], LOCAL)
    assert (made.user, made.name, made.role, made.queue, made.expires_at) == ("ann", "ci", "user", "team", None)
    assert len(digest_of("x")) == 64 and len(whole.split("_", 2)[2]) >= 43


def test_no_token_makes_one_that_may_do_or_last_more_than_itself(auth: Auth, clock: VirtualClock) -> None:
    narrow, whole = token_for(auth, role=UserRole.USER, queue="team", ttl_s=100.0)
    caller = auth.check(asked(whole))
    made, _ = token_for(auth, caller, role=UserRole.ADMIN, ttl_s=None)
    assert (made.role, made.queue, made.expires_at, made.by) == ("user", "team", narrow.expires_at, "ann")
    made, _ = token_for(auth, caller, role=UserRole.VIEWER, queue="team/a", ttl_s=5.0)
    assert (made.role, made.queue, made.expires_at) == ("viewer", "team/a", clock.wall_s() + 5.0)
    assert token_for(auth, caller, ttl_s=1000.0)[0].expires_at == narrow.expires_at
    for queue in ("open", "teams"):
        with pytest.raises(NotAllowed, match=f"queue '{queue}' is not below 'team'"):
            token_for(auth, caller, queue=queue)
    with pytest.raises(NotAllowed, match="needs the role admin"):
        token_for(auth, caller, user="bob")


def test_an_admin_makes_tokens_of_others_without_a_bound_of_its_own(auth: Auth) -> None:
    auth.accounts.apply(record(UserChanged(name="root", grants=(("", "admin"),))))
    caller = auth.check(asked(token_for(auth, user="root", ttl_s=50.0)[1]))
    made, _ = token_for(auth, caller, user="ann", role=UserRole.QUEUE_ADMIN, queue="team")
    assert (made.role, made.queue, made.expires_at, made.by) == ("queue-admin", "team", None, "root")


def test_who_may_revoke_a_token(auth: Auth) -> None:
    def made(**how: Any) -> TokenMade:
        return TokenMade(**{"id": "z", "user": "ann", "digest": "", "role": "user", "queue": "team/a", **how})

    admin = auth.check(asked(OWN))
    mine = auth.check(asked(token_for(auth, role=UserRole.USER, queue="team")[1]))
    assert auth.may_revoke(admin, made(user="bob", role="admin", queue=""))
    assert auth.may_revoke(mine, made())
    assert auth.may_revoke(mine, made(role="viewer", queue="team"))
    assert not auth.may_revoke(mine, made(user="bob"))
    assert not auth.may_revoke(mine, made(role="queue-admin"))
    assert not auth.may_revoke(mine, made(queue=""))
    auth.accounts.apply(record(TokenRevoked(id=mine.token)))
    assert not auth.may_revoke(mine, made())


def test_the_token_of_the_installation_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = ensure_token(path, SeededRandom(1))
    assert (path.read_text(), path.stat().st_mode & 0o777) == (f"{token}\n", 0o600)
    path.chmod(0o644)
    assert (ensure_token(path, SeededRandom(2)), path.stat().st_mode & 0o777) == (token, 0o600)
    found, whole = fresh_token(SeededRandom(3))
    assert whole.startswith(f"rota_{found}_") and found == found.lower() and len(found) == 8


def test_a_token_file_that_is_no_text_is_refused_as_one_without_a_whole_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(StoreCorrupt):
        ensure_token(path, SeededRandom(1))
    assert path.read_bytes() == b"\xff\xfe" * 20


# -- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "path", "below"),
    (("a", "", True), ("", "", True), ("a", "a", True), ("a/b", "a", True), ("ab", "a", False), ("a", "a/b", False),
     ("", "a", False), ("b", "a", False)),
)  # fmt: skip
def test_a_queue_is_below_itself_and_those_above(queue: str, path: str, below: bool) -> None:
    assert is_below(queue, path) is below


def test_the_narrower_of_two_paths_is_the_lower_one_on_one_line() -> None:
    assert [narrower("a/b", "a"), narrower("a", "a/b"), narrower("", "a"), narrower("a", "b")] == [
        "a/b",
        "a/b",
        "a",
        None,
    ]


def test_roles_have_words_and_an_order() -> None:
    assert [role.word for role in UserRole] == ["machine", "viewer", "user", "queue-admin", "admin"]
    assert [int(role) for role in UserRole] == [0, 1, 2, 3, 4]
    assert all(UserRole.of(role.word) is role for role in UserRole)
    with pytest.raises(BadInput, match="no role 'king'") as caught:
        UserRole.of("king")
    assert caught.value.hint == "roles: machine, viewer, user, queue-admin, admin"


def test_the_highest_role_of_a_line_of_queues_counts() -> None:
    caller = Caller(
        user="u", by="token", grants=(("a", UserRole.VIEWER), ("a/b", UserRole.QUEUE_ADMIN), ("", UserRole.VIEWER))
    )
    assert [caller.role_on(queue) for queue in ("a", "a/b/c", "z", "")] == [
        UserRole.VIEWER, UserRole.QUEUE_ADMIN, UserRole.VIEWER, UserRole.VIEWER,
    ]  # fmt: skip
    assert (
        caller.has(UserRole.QUEUE_ADMIN, "a/b")
        and not caller.has(UserRole.ADMIN, "a/b")
        and not caller.has(UserRole.USER)
    )
    assert Caller(user="u", by="token", grants=(("a", UserRole.USER),)).role_on("b") is None
    caller.need(UserRole.VIEWER, "q")
    with pytest.raises(NotAllowed, match="this needs the role user on queue 'a'") as caught:
        caller.need(UserRole.USER, "a")
    assert caught.value.hint == "u is viewer of a, queue-admin of a/b, viewer of all queues"
    with pytest.raises(NotAllowed, match="role admin on the whole installation") as caught:
        Caller(user="u", by="token", grants=()).need(UserRole.ADMIN)
    assert caught.value.hint == "u is nothing"


def story(queue: str, user: str) -> Any:
    return SimpleNamespace(queue=queue, submitted=SimpleNamespace(user=user))


@pytest.mark.parametrize(
    ("role", "owner", "sees", "reads", "steers"),
    (
        (None, "u", False, False, False),
        (UserRole.VIEWER, "u", True, True, False),
        (UserRole.VIEWER, "v", True, False, False),
        (UserRole.USER, "u", True, True, True),
        (UserRole.USER, "v", True, False, False),
        (UserRole.QUEUE_ADMIN, "v", True, True, True),
        (UserRole.ADMIN, "v", True, True, True),
    ),
)
def test_what_a_role_may_do_to_a_job(role: UserRole | None, owner: str, sees: bool, reads: bool, steers: bool) -> None:
    caller = Caller(user="u", by="token", grants=(("q", role),) if role else (("other", UserRole.ADMIN),))
    job = story("q/a", owner)
    assert (caller.sees(job), caller.reads(job), caller.steers(job)) == (sees, reads, steers)


def test_a_token_is_valid_until_its_time_and_while_it_is_not_revoked() -> None:
    made = TokenMade(id="t", user="u", digest="", expires_at=5.0)
    assert Token(made=made, at=0.0).valid(4.9) and not Token(made=made, at=0.0).valid(5.0)
    assert not Token(made=made, at=0.0, revoked_at=1.0).valid(2.0)
    assert Token(made=TokenMade(id="t", user="u", digest=""), at=0.0).valid(1e12)


def test_accounts_are_what_the_log_says() -> None:
    accounts, made = AccountBook(), TokenMade(id="t", user="u", digest="d")
    given = UserChanged(name="u", grants=(("q", "user"),))
    events = (given, made, TokenRevoked(id="none"), UserChanged(name="v", grants=()), JobQueued())
    for at, event in enumerate(events, start=1):
        accounts.apply(record(event, float(at)))
    assert (accounts.users, accounts.tokens) == ({"u": {"q": UserRole.USER}}, {"t": Token(made=made, at=2.0)})
    accounts.apply(record(TokenRevoked(id="t"), 6.0))
    assert accounts.tokens == {"t": Token(made=made, at=2.0, revoked_at=6.0)}
    assert accounts.caller(made, by="x").grants == (("q", UserRole.USER),)
    assert accounts.caller(TokenMade(id="a", user="none", digest=""), by="x").grants == ()
    assert accounts.caller(TokenMade(id="a", user=LOCAL, digest="", role="user", queue="q"), by="x").grants == (
        ("q", UserRole.USER),
    )


def test_names_of_jobs_and_owners_that_a_caller_may_not_see_are_covered_everywhere() -> None:
    jobs = {"j-1": story("q", "u"), "j-2": story("z", "w"), "j-3": story("q", "v")}
    redactor = Redactor(jobs, Caller(user="u", by="token", grants=(("q", UserRole.VIEWER),)))
    document = {
        "j-2": ["j-1 waits for j-2.", ("j-3", 4)], "user": "w", "by": "v", "marked_by": "", "name": "w", "n": 2,
        "job": {"user": "u", "by": None},
    }  # fmt: skip
    assert redactor.redact(document) == {
        REDACTED: [f"j-1 waits for {REDACTED}.", ["j-3", 4]], "user": REDACTED, "by": "v", "marked_by": "", "name": "w",
        "n": 2, "job": {"user": "u", "by": None},
    }  # fmt: skip
    whole = Redactor(jobs, Caller(user="a", by="token", grants=(("", UserRole.VIEWER),)))
    assert whole.redact(document) is document


def test_the_limits_of_failures_codes_and_sessions_are_those_of_the_pages() -> None:
    limits = (FAILURES_MAX, auth_module.FAILING_MAX, FAILURES_WINDOW_S, CODES_OF_USER_MAX, CODE_TTL_S, SESSION_TTL_S)
    assert limits == (10, 1000, 60.0, 32, 600.0, 7 * 86400.0)


def test_a_request_without_a_host_is_none_of_this_service(auth: Auth) -> None:
    auth.hosts = frozenset({"xx", "here"})
    with pytest.raises(NotAllowed, match="host '' is not one"):
        auth.check(AuthRequest(method="GET", headers={"authorization": f"Bearer {OWN}"}))
