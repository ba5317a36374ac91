"""A contract for import-linter: a package imports nothing from outside but the standard library."""

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class StdlibOnly(Contract):
    """No module of `package` imports a third-party module, apart from `except_imports` ("importer -> imported")."""

    package = fields.StringField()
    except_imports = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        ours = self.package.split(".")[0]
        imports = {
            f"{module} -> {imported}"
            for module in {self.package} | graph.find_descendants(self.package)
            for imported in graph.find_modules_directly_imported_by(module)
            if imported.split(".")[0] not in {ours, *sys.stdlib_module_names}
        }
        illegal = sorted(imports - (self.except_imports or set()))
        return ContractCheck(kept=not illegal, metadata={"illegal": illegal})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["illegal"]:
            output.print_error(line)
