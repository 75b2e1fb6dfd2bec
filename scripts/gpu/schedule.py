"""Runs jobs side by side on the GPUs of one machine."""
import threading
import time


class Job:
    """Something that needs `gpus` GPUs, each for one of its `share` places or, if `whole`, for all of them.

    `alone`: nothing else runs on the machine meanwhile. `run(gpus)` does the work, on a thread of its own.
    """

    def __init__(self, name, gpus, run, whole=False, alone=False):
        self.name, self.gpus, self.run, self.whole, self.alone = name, gpus, run, whole, alone


class Schedule:
    """`count` GPUs with `share` places each, at most `jobs` jobs at a time.

    Jobs start in the order given. One that does not fit yet keeps the GPUs that it waits for: later jobs may go ahead on
    others only, so that nothing waits for ever. Jobs that have not started by `deadline` (time.monotonic) are returned.
    """

    def __init__(self, count, share=1, jobs=None, deadline=None):
        self.count, self.share, self.jobs, self.deadline = count, share, jobs or count * share, deadline
        self.load = [0] * count
        self.running = 0
        self.changed = threading.Condition()
        self.errors = []

    def run(self, queue):
        queue = list(queue)
        for job in queue:
            if job.gpus > self.count:
                raise ValueError(f"{job.name} needs {job.gpus} GPUs, there are {self.count}")
        with self.changed:
            while queue and not self.expired():
                started = self.start_what_fits(queue)
                queue = [job for job in queue if job not in started]
                if queue and not started:
                    left = None if self.deadline is None else max(0, self.deadline - time.monotonic())
                    self.changed.wait(left)
            while self.running:
                self.changed.wait()
        if self.errors:
            raise self.errors[0]
        return queue

    def expired(self):
        return self.deadline is not None and time.monotonic() >= self.deadline

    def start_what_fits(self, queue):
        started, kept = [], set()
        for job in queue:
            if self.running >= self.jobs or len(kept) == self.count:
                break
            if job.alone:
                if self.running:
                    break
                places = list(range(job.gpus))
            else:
                weight = self.share if job.whole else 1
                # The least loaded first.
                order = sorted((g for g in range(self.count) if g not in kept), key=lambda g: (self.load[g], g))
                places = [g for g in order if self.load[g] + weight <= self.share][:job.gpus]
                if len(places) < job.gpus:
                    kept.update(order[:job.gpus])
                    continue
            started.append(job)
            self.start(job, sorted(places))
            if job.alone:
                break
        return started

    def start(self, job, places):
        weight = self.share if job.whole or job.alone else 1
        for g in places if not job.alone else range(self.count):
            self.load[g] += weight
        self.running += 1

        def work():
            try:
                job.run(places)
            except BaseException as error:  # told to whoever called run()
                self.errors.append(error)
            finally:
                with self.changed:
                    for g in places if not job.alone else range(self.count):
                        self.load[g] -= weight
                    self.running -= 1
                    self.changed.notify_all()

        threading.Thread(target=work, name=job.name, daemon=True).start()
