"""Steps of a model whose saved tensors move, and of a plain twin; nothing may be left of any step."""

import contextlib

import torch
from cases import Transformer, finish, make, tokens
from support import HandleRig, assert_equal

from ebbtide._utils.torch_private import top_pack_hook

CPU = torch.device("cpu")


class TwinTraining:
    """Steps of a model and of its plain twin."""

    def __init__(self, rig: HandleRig, recipe, is_context: bool) -> None:
        self.rig = rig
        self.model, self._twin = (make(lambda: Transformer(depth=1), CPU) for _ in range(2))
        self._context = rig.context if is_context else contextlib.nullcontext()
        source = rig.context if is_context else rig.offload(self.model, recipe)
        self.report, self.stats = source.report, source.stats
        self.then = lambda: None
        self._steps = 0

    def forward(self) -> torch.Tensor:
        with self._context:
            return self.model(tokens(CPU, self._steps))

    def step(self) -> list[torch.Tensor]:
        self.model.zero_grad()
        return finish(self.forward(), self.model)

    def check(self) -> None:
        """The next step equals the twin's, and nothing is left of any step."""
        self._steps += 1
        ours = self.step()
        self._twin.zero_grad()
        assert_equal(ours, finish(self._twin(tokens(CPU, self._steps)), self._twin))
        del ours
        self.rig.check_no_races()
        self.rig.check_at_rest()
        engine = self.rig.engine
        assert engine._refs == engine._outbound._resident_of == engine._retained == {}
        assert engine._outbound._resident == engine._retained_bytes == 0
        assert top_pack_hook() is None
