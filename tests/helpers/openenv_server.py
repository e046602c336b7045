"""A server of the real OpenEnv library: guess a number. Run with an interpreter that has openenv-core: `... PORT SESSIONS`."""

import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """Guess the secret number."""

    number: int


class Hint(Observation):
    hint: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.guesses = 0, 0

    def reset(self, seed=None, episode_id=None, secret=None, **_):
        self.secret, self.guesses = secret if secret is not None else seed % 10, 0
        return Hint(hint="Guess a number from 0 to 9.")

    def step(self, action, timeout_s=None, **_):
        self.guesses += 1
        if action.number == 666:
            raise RuntimeError("no such number")
        if action.number == 99:
            time.sleep(5)
        if action.number == self.secret:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.secret else "lower", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
