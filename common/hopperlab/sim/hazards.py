"""What is checked while a kernel runs: reads of shared memory that nothing wrote, and races."""

from . import memory


class Observer:
    def __init__(self, machine, cluster):
        self.machine, self.cluster = machine, cluster
        self.written = memory.WrittenMap(cluster.shared.size)

    def shared_access(self, span, index, shift, size, write, instruction):
        if write:
            self.written.write(index, shift)
        else:
            self.written.read(span, index, shift, instruction)

    def release(self, fragment, barrier): ...
    def acquire(self, fragment, barrier): ...
    def barrier_complete(self, barrier): ...
    def warp_sync(self, fragment): ...
    def thread_exit(self, fragment): ...
    def finish(self): ...


def make_observer(machine, cluster):
    return Observer(machine, cluster)
