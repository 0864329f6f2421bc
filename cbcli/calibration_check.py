"""What `doctor` says of the calibration of the model that is used."""

from __future__ import annotations

from collections.abc import Iterator

from cache_store.errors import CacheblendError, IntegrityError
from cbcli.calibrated import by_version, this_version
from cbcli.checks import LARGEST_HASHED, Check
from cbcli.session import FINGERPRINTS
from cbcli.settings import Settings, data_root
from engine import library

_HINT = "cacheblend calibrate measures it"


def check_calibration(settings: Settings) -> Iterator[Check]:
    """Whether there is one, for the device and type that are used, and what its gate says."""
    try:
        info = library.show(settings.model, settings.models_dir)
    except CacheblendError:
        return  # what is wrong with the model was told
    if info.config is None or info.problem:
        return
    from engine.calibration.profile import FOLDER, Subject, places_of, read_profile
    from engine.codec import choose_kv_dtype, precision
    from engine.fingerprint import known_fingerprint, model_fingerprint
    from engine.model import choose_device, choose_dtype

    name = settings.model
    fingerprint = known_fingerprint(info.path, info.config, data_root() / FINGERPRINTS)
    if fingerprint is None and info.nbytes > LARGEST_HASHED:
        there = "files" if (info.path / FOLDER).is_dir() else "no files"
        said = f"{name}: {there} in its folder; not read, that takes reading all of the model"
        yield Check("calibration", "ok", said)
        return
    device = choose_device(settings.device)
    computed = choose_dtype(settings.dtype, info.config.dtype, device)
    dtype = precision(computed, choose_kv_dtype(settings.kv_dtype, computed))
    fingerprint = fingerprint or model_fingerprint(info.path, info.config)
    subject = Subject(fingerprint, dtype, device.type)
    try:
        profile = read_profile(subject, places_of(info.path, subject.model, data_root()))
    except IntegrityError as error:
        yield Check("calibration", "warn", error.message, error.hint)
        return
    where = f"{dtype} on {device.type}"
    if profile is None or profile.gate is None:
        yield Check("calibration", "ok", f"{name}: none for {where}", _HINT)
        return
    if profile.version != this_version():
        failed = f", the gate failed: {profile.gate.why}" if not profile.gate.passed else ""
        version = by_version(profile.version)
        said = f"{name}: {where}, calibrated by {version}: calibrate again{failed}"
        old = {"version": profile.version, "passed": profile.passed, "why": profile.gate.why}
        yield Check("calibration", "warn" if failed else "ok", said, _HINT, old)
        return
    found = {f"{task.task}, context {task.context}": task for task in profile.tasks}
    facts = {
        "passed": profile.passed,
        "why": profile.gate.why,
        "date": profile.date,
        "tasks": {what: [task.policy, str(task.ratio)] for what, task in found.items()},
    }
    if not profile.gate.passed:
        hint = "check its config.json; ask and run don't blend it without --force"
        said = f"{name}: must not be blended in {where}: {profile.gate.why}"
        yield Check("calibration", "fail", said, hint, facts)
        return
    tasks = [f"{what}: {task.policy} at {task.ratio}" for what, task in found.items()]
    said = f"{name}: {where}, passed on {profile.date[:10]}; {'; '.join(tasks) or 'no curve yet'}"
    yield Check("calibration", "ok", said, "" if tasks else _HINT, facts)
