"""Every study by name, in the order of the paper."""

from benchmarks import (
    anatomy,
    clouds,
    compiling,
    curves,
    exchange,
    interaction,
    ladder,
    pairs,
    parts,
    repeating,
)
from benchmarks import logistic as steptime
from experiments import (
    cifar,
    cifar_time,
    crash,
    few,
    fuzz,
    language,
    logistic,
    mnist,
    reference,
    repeat,
    sensitivity,
    soak,
    toy,
    uci,
)
from experiments.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        toy.STUDY,
        logistic.STUDY,
        logistic.PLATEAU,
        sensitivity.STUDY,
        mnist.STUDY,
        cifar.STUDY,
        cifar_time.STUDY,
        language.STUDY,
        clouds.STUDY,
        steptime.STUDY,
        interaction.STUDY,
        anatomy.STUDY,
        parts.STUDY,
        ladder.STUDY,
        pairs.STUDY,
        compiling.STUDY,
        curves.STUDY,
        exchange.STUDY,
        reference.STUDY,
        few.STUDY,
        few.KERNELS,
        uci.STUDY,
        crash.STUDY,
        repeat.STUDY,
        repeating.STUDY,
        fuzz.STUDY,
        soak.STUDY,
    )
}
