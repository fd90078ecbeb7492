"""A redacted audit names no host, user or path of its own, and still says all that the answer rests on."""

from __future__ import annotations

import dataclasses
import json

from reports.markdown import render
from reports.model import Audit, Probe, Target, to_json
from reports.redact import redact
from tests.reports.samples import EVIDENCE, audit, everywhere, verdict

PLACES = (
    "root@gpu1.example.com gpu1 gpu1.example.com /root/ml-env/lib/python3.12/site-packages/vllm/x.py "
    "/root/ml-env/bin/python3.12 /home/anna/x 10.1.2.3"
)


def filled() -> Audit:
    """Every string but the target's own starts with the host's names."""
    return dataclasses.replace(everywhere(audit(), PLACES + " "), target=audit().target)


def test_names_of_the_host_are_gone_from_every_string() -> None:
    text = json.dumps(to_json(redact(filled())))
    for name in ("gpu1", "example.com", "ml-env", "/root", "anna", "10.1.2.3", "root@"):
        assert name not in text, name
    assert "SITE_PACKAGES" in text and "HOST" in text and "USER@HOST" in text


def test_what_the_answer_rests_on_stays() -> None:
    clean = redact(audit())
    assert [v.outcome for v in clean.verdicts] == [v.outcome for v in audit().verdicts]
    assert clean.verdict("verifiers") == audit().verdict("verifiers")
    assert clean.install == audit().install
    assert clean.target == Target("USER@HOST", "ssh", "HOST", "PYTHON", "SITE_PACKAGES")
    assert "gpu1" not in render(clean)


def test_twice_is_once() -> None:
    once = redact(filled())
    assert redact(once) == once


def test_a_host_named_like_a_folder_does_not_eat_file_names() -> None:
    target = dataclasses.replace(audit().target, spec="gpu", host="gpu")
    found = dataclasses.replace(EVIDENCE, file="vllm/v1/worker/gpu/model_runner.py")
    clean = redact(
        audit(target=target, verdicts=(verdict("tree-walk", "no", "gpu says no: worker/gpu/x", evidence=(found,)),))
    )
    assert clean.target.host == "HOST"
    assert clean.verdicts[0].evidence[0].file == found.file
    assert clean.verdicts[0].summary == "HOST says no: worker/gpu/x"


def test_a_wheel_file_loses_its_folder() -> None:
    target = Target("wheel:/home/anna/vllm-0.33.0.whl", "wheel")
    assert redact(audit(target=target)).target.spec == "wheel:PATH"
    published = Target("pypi:vllm==0.33.0", "pypi")
    assert redact(audit(target=published)).target == published


def test_keys_and_the_users_of_home_folders_are_cleaned_too() -> None:
    facts = {
        "disks": {"/home/alice.secret": {"free": 1}, "/home/alice.secret/x": {"free": 2}},
        "user": "alice.secret",
        "url": "gpu1.example.com:24001",
        "host": "gpu1",
    }
    target = dataclasses.replace(audit().target, spec="root@gpu1.example.com:24001")
    clean = redact(audit(target=target, probes=(Probe("host", "ok", facts=facts),)))
    assert clean.probes[0].facts == {
        "disks": {"PATH": {"free": 1}, "PATH-2": {"free": 2}},
        "user": "USER",
        "url": "HOST",
        "host": "HOST",
    }
    assert clean.target.spec == "USER@HOST"
    assert redact(clean) == clean
