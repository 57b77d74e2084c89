"""`ebbtide doctor` and `ebbtide bench` on an accelerator."""

import json

import pytest
import torch

from ebbtide._cli import main

if not torch.accelerator.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)

pytestmark = pytest.mark.gpu


def test_every_device_is_measured(tmp_path, capsys):
    main(["doctor", "--json", "--disk-dir", str(tmp_path)])
    findings = {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    kind = torch.accelerator.current_accelerator().type
    for index in range(torch.accelerator.device_count()):
        link, pinning = (findings[f"{kind}:{index} {part}"]["figures"] for part in ("link", "pinning"))
        assert all(rate > 0 for rate in link.values())
        assert pinning["s_per_gib"] > 0


def test_the_plan_of_the_toy_has_the_peak_of_checkpointing(capsys):
    assert main(["bench", "--json", "--steps", "20"]) == 0
    result = json.loads(capsys.readouterr().out)
    runs = result["runs"]
    assert runs["planned"]["peak_bytes"] <= runs["checkpointed"]["peak_bytes"] < runs["plain"]["peak_bytes"]
    assert result["link"]["out_bytes_per_s"] > 0
