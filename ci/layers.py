"""A contract for import-linter: some packages import nothing from outside but the standard library."""

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class StdlibOnly(Contract):
    """No module of `packages` imports a third-party module, apart from `except_imports` ("importer -> imported")."""

    packages = fields.ListField(subfield=fields.StringField())
    except_imports = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        imports = {
            f"{module} -> {imported}"
            for package in self.packages
            for module in {package} | graph.find_descendants(package)
            for imported in graph.find_modules_directly_imported_by(module)
            if imported.split(".")[0] not in {package.split(".")[0], *sys.stdlib_module_names}
        }
        illegal = sorted(imports - (self.except_imports or set()))
        return ContractCheck(kept=not illegal, metadata={"illegal": illegal})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["illegal"]:
            output.print_error(line)
