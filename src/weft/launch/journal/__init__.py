"""The files that a job leaves in its folder while it runs, and how another process reads them and ends the job.

    run.json           the newest start: what was to run where, with secrets masked, and who the launcher is
    events.jsonl       what happened when, of all starts; the launcher holds its lock as long as it runs
    failure.json       the newest failure: who is to blame, and what all ranks said
    attempt-N/         what each rank wrote, rank-R.log; N counts the starts in this folder, restarts included

journal (the names, and writing) -> job_status (reading, and signals to the launcher)
"""
