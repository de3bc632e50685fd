"""Every answer that a test sees is what its route declares: no field more, none less, each of its type."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from rota.service.models.base import ProblemDocument
from rota.service.rest.app import application


def routes_of(app: FastAPI) -> list[APIRoute]:
    """Every route of the application."""
    return [route for route in app.routes if isinstance(route, APIRoute)]


def route_of(method: str, path: str) -> APIRoute | None:
    """The route that a request comes to."""
    return next((one for one in _known() if method in (one.methods or ()) and one.path_regex.match(path)), None)


@cache
def _known() -> tuple[APIRoute, ...]:
    return tuple(routes_of(application()))


@cache
def _adapter(document: type) -> TypeAdapter[Any]:
    return TypeAdapter(document)


async def check(answer: httpx.Response) -> None:
    """An event hook of a client. Raises AssertionError naming each field that the route does not declare so."""
    has_body = answer.request.method != "HEAD"
    if has_body and answer.headers.get("content-type") == "application/problem+json":
        _adapter(ProblemDocument).validate_json(await answer.aread(), strict=True)
    if has_body and answer.is_success and answer.headers.get("content-type") == "application/json":
        request = answer.request
        route = route_of(request.method, re.sub("^http://[^/]+", "", str(request.url)).partition("?")[0])
        if route is not None and route.response_model is not None:
            await answer.aread()
            try:
                _adapter(get_args(route.response_model)[0]).validate_json(answer.content, strict=True)
            except ValidationError as error:
                raise AssertionError(f"{request.method} {request.url}: {error}") from error
