"""What the simulator raises.  Every message says what happened, where, why it is wrong and what to look at."""


class SimulatorError(Exception):
    """Base of everything that a simulated launch can raise."""


class LaunchRefused(SimulatorError, ValueError):
    """The launch breaks a limit of the hardware or does not fit the kernel's parameters; nothing ran."""


class UnknownInstruction(SimulatorError):
    """The PTX holds an instruction, modifier or operand that the simulator does not model."""


class MemoryFault(SimulatorError):
    """An access outside every tensor or window, a misaligned access, or a read of memory that nothing wrote."""


class Hazard(SimulatorError):
    """A race, a protocol mistake or undefined behaviour that a GPU may or may not show."""


class Deadlock(SimulatorError):
    """Every live thread waits and nothing is in flight."""
