"""A process for each rank of a script in this folder."""
import multiprocessing
import multiprocessing.connection

# A rank that exits with it has said `ABSENT name: ...`: what the script needs is not there, which is no failure.
ABSENT = 77


def run(name, rank_main, arguments):
    """Calls `rank_main` with each of `arguments`, a tuple a rank, in a process of its own. Says `PASS name` if all end well;
    returns the status to exit with."""
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=rank_main, args=of_rank) for of_rank in arguments]
    for process in running:
        process.start()
    # The first that fails ends the others, who would wait for it.
    status = 0
    while running and status == 0:
        multiprocessing.connection.wait([process.sentinel for process in running])
        for process in [p for p in running if p.exitcode is not None]:
            running.remove(process)
            status = status or process.exitcode
    for process in running:
        process.join(2)
        process.kill()
    if status == 0:
        print(f"PASS {name}")
    return 0 if status in (0, ABSENT) else 1
