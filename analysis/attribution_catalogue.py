"""Tables and figures about attributions, ablations, activations and channel scores by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from analysis.load import attributions as statistics
from analysis.load.study import Study
from analysis.made import Made, of_model
from analysis.outputs import attributions, budgets
from analysis.outputs.captions import of_pass
from analysis.render.style import Figure
from analysis.stats.comparison import Comparison

DEPTH = ("Which experts get what, and what they give", "Statistics of experts by depth, as gathered.")
SIZES = (
    "How large activations are",
    "Activations: the inputs of an expert's down projection over the tokens that it got.",
)


def _ablations(study: Study, comparisons: Sequence[Comparison]) -> Made:
    return _per_model(
        study,
        "coverage.fig2",
        lambda model, name: attributions.ablation_figure(study.experts, model=model, name=name),
    )


def _agreement(study: Study, comparisons: Sequence[Comparison]) -> Made:
    table = attributions.agreement_table(study, study.experts, name="coverage.table14")
    return [table] if len(table.frame) else []


def _by_depth(name: str, measures: Mapping[str, str], title: str, caption: str) -> Callable[..., Made]:
    def made(study: Study, comparisons: Sequence[Comparison]) -> Made:
        return _per_model(
            study,
            name,
            lambda model, stem: attributions.depth_figure(
                study.experts,
                measures,
                model=model,
                name=stem,
                title=title,
                caption=caption,
            ),
        )

    return made


def _scores(study: Study, comparisons: Sequence[Comparison]) -> Made:
    drawn = []
    for comparison in comparisons:
        name = of_model(comparisons, "coverage.fig4", comparison)
        drawn.append(budgets.concentration_figure(study, comparison, name=name))
        drawn.append(budgets.loss_figure(study, comparison, name=f"{name}.loss"))
    return _noted(study, drawn)


def _budgets(study: Study, comparisons: Sequence[Comparison]) -> Made:
    losses = statistics.layer_losses(study)
    drawn = (
        budgets.budget_figure(study, comparison, losses, name=of_model(comparisons, "coverage.fig7", comparison))
        for comparison in comparisons
    )
    return _noted(study, drawn)


def _smoothings(study: Study, comparisons: Sequence[Comparison]) -> Made:
    losses = statistics.layer_losses(study)
    return _per_model(
        study,
        "coverage.fig12",
        lambda model, name: attributions.smoothing_figure(losses, model=model, name=name),
    )


def _stacks(study: Study, comparisons: Sequence[Comparison]) -> Made:
    drawn = (
        budgets.stack_figure(study, comparison, study.experts, name=of_model(comparisons, "coverage.fig14", comparison))
        for comparison in comparisons
    )
    return _noted(study, drawn)


def _per_model(study: Study, name: str, draw: Callable[[str, str], Figure | None]) -> Made:
    models = list(dict.fromkeys(study.experts["model"]))
    drawn = (draw(model, name if len(models) == 1 else f"{name}.{model}") for model in models)
    return _noted(study, drawn)


def _noted(study: Study, drawn: Iterable[Figure | None]) -> Made:
    """The figures there are, with what their numbers rest on in the captions."""
    return [replace(figure, caption=f"{figure.caption} Made with {of_pass(study)}") for figure in drawn if figure]


OUTPUTS: Mapping[str, Callable[[Study, Sequence[Comparison]], Made]] = {
    "coverage.fig2": _ablations,
    "coverage.table14": _agreement,
    "coverage.fig3": _by_depth("coverage.fig3", statistics.MEASURES, *DEPTH),
    "coverage.fig4": _scores,
    "coverage.fig7": _budgets,
    "coverage.fig12": _smoothings,
    "coverage.fig13": _by_depth("coverage.fig13", statistics.MAGNITUDES, *SIZES),
    "coverage.fig14": _stacks,
}
"""Name -> what makes its tables and figures; an empty list when the store has no sums, or no channel scores."""
