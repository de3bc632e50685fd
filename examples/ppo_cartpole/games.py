"""Games of CartPole (gymnasium 1.4.0, A. G. Barto et al. 1983) played with a policy in numpy; loads no torch.

What a game is between two moves is five numbers, so whoever has them goes on with it: nothing is lost with a player.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from numpy.typing import NDArray
from ppo import ENVS, LENGTH

MOVES_MAX = 500
"""A game that lasts so long is won."""
Game = list[float]
"""Position, speed, angle, angular speed of the pole, and moves made."""


class Policy:
    """The actor's network as numpy sees it."""

    def __init__(self) -> None:
        self._layers: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Take the weights of a `torch.nn.Sequential` of linear layers by their names."""
        numbers = sorted({int(name.split(".")[0]) for name in tensors})
        self._layers = [(np.array(tensors[f"{n}.weight"]).T, np.array(tensors[f"{n}.bias"])) for n in numbers]

    def log_p(self, states: NDArray[Any]) -> NDArray[Any]:
        """Logarithms of the probabilities of both moves [N, 2] in states [N, 4]."""
        for weight, bias in self._layers[:-1]:
            states = np.tanh(states @ weight + bias)
        scores = states @ self._layers[-1][0] + self._layers[-1][1]
        return scores - np.logaddexp(scores[:, :1], scores[:, 1:])


def fresh(chance: np.random.Generator) -> Game:
    """A game before its first move."""
    return [*chance.uniform(-0.05, 0.05, 4).tolist(), 0]


def first_games(seed: int) -> list[Game]:
    """Those of step 1."""
    chance = np.random.default_rng((seed, 0))
    return [fresh(chance) for _ in range(ENVS)]


def play(policy: Policy, games: list[Game], seed: tuple[int, ...]) -> dict[str, Any]:
    """LENGTH moves of each game, begun anew where it ends: states, moves, log_p, rewards, over [T, N], last states [N].

    ``games`` of the result go on where these stop, ``lengths`` are those of the games that ended.
    """
    chance, env = np.random.default_rng(seed), CartPoleEnv()
    count = len(games)
    games = [list(game) for game in games]
    found: dict[str, Any] = {
        "states": np.zeros((LENGTH, count, 4), np.float32),
        "moves": np.zeros((LENGTH, count), np.int64),
        "log_p": np.zeros((LENGTH, count), np.float32),
        "rewards": np.ones((LENGTH, count), np.float32),
        "over": np.zeros((LENGTH, count), np.float32),
    }
    lengths: list[int] = []
    for t in range(LENGTH):
        states = found["states"][t] = np.array([game[:4] for game in games], np.float32)
        log_p = policy.log_p(states)
        moves = found["moves"][t] = (chance.random(count) < np.exp(log_p[:, 1])).astype(np.int64)
        found["log_p"][t] = log_p[np.arange(count), moves]
        for n, move in enumerate(moves):
            if move_on(env, games[n], int(move)):
                found["over"][t, n] = 1
                lengths.append(int(games[n][4]))
                games[n] = fresh(chance)
    return {**found, "last": np.array([game[:4] for game in games], np.float32), "games": games, "lengths": lengths}


def move_on(env: CartPoleEnv, game: Game, move: int) -> bool:
    """One move of a game, in place; True when it is over."""
    env.reset(seed=0)
    env.state = np.array(game[:4])
    _, _, fell, _, _ = env.step(move)
    game[:4] = np.asarray(env.state).tolist()
    game[4] += 1
    return bool(fell) or game[4] >= MOVES_MAX


def greedy_length(policy: Policy, seed: int) -> int:
    """How long a game lasts when the likelier move is always made."""
    env, game = CartPoleEnv(), fresh(np.random.default_rng((9, seed)))
    while not move_on(env, game, int(policy.log_p(np.array([game[:4]], np.float32))[0].argmax())):
        pass
    return int(game[4])
