"""No circle of imports in the package of analysis, imports of the type checker and in functions included."""

import graphlib

import grimp


def test_analysis_has_no_circle_of_imports():
    graph = grimp.build_graph("rstar_lab", exclude_type_checking_imports=False)
    modules = {module for module in graph.modules if module.startswith("rstar_lab.analysis")}
    imports = {module: graph.find_modules_directly_imported_by(module) & modules - {module} for module in modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError
