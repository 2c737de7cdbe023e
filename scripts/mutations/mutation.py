import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # below kernels/
    edits: tuple  # of (text that occurs exactly once, its replacement)
    compile: tuple  # (architecture, part of the instance names): what --compile compiles
    kernel: str = ""  # its name in verify's JSON; only cases that it served count
    arch_code: str = "sm_80"  # the --arch-code for which this kernel is selected
    verify: tuple = ()  # (suite, filter)
    repeat: int = 1
    bench: tuple = ()  # (suite, filter) of tessera bench --check
    gtest: str = ""  # filter of cuda_test
    race: bool = False  # the result depends on timing: repeated, on shapes with many tiles
    delayed: bool = False  # warps are late at random (delayed_sources.py): without, this race is not seen
    gate: bool = False  # ptxas repairs it and reports that: the compile gate must fail
    excuse: str = ""  # why it may go uncaught; it is then listed, but does not count
