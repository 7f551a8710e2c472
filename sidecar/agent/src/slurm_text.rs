//! What squeue prints, as this agent asks for it: `%A|%U|%T|%k`, one job a line.

use pliant_model::{JobId, job_state};
use pliant_protocol::job::SliceMark;

/// The format for squeue. The comment is last: it is the user's text and may contain the separator.
pub const FORMAT: &str = "%A|%U|%T|%k";

/// A job as squeue shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Id.
    pub id: JobId,
    /// Owner.
    pub uid: u32,
    /// State in its long form.
    pub state: String,
    /// The mark in its comment; `None`: it is no slice.
    pub mark: Option<SliceMark>,
}

impl Job {
    /// Whether it has ended, or is ending.
    pub fn is_over(&self) -> bool {
        self.state == "COMPLETING" || job_state::is_over(&self.state)
    }

    fn parse(line: &str) -> Option<Job> {
        let mut fields = line.splitn(4, '|');
        let (id, uid, state, comment) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let state_known = !state.is_empty() && state.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
        state_known.then_some(())?;
        Some(Job {
            id: id.parse().ok()?,
            uid: uid.parse().ok()?,
            state: state.to_owned(),
            mark: SliceMark::parse(comment),
        })
    }
}

/// What a look at one job by its id shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// The job.
    Job(Job),
    /// Slurm does not know the id any more.
    Gone,
    /// Slurm did not answer, or not so that it can be believed: nothing may be concluded.
    Failed(String),
}

/// The answer of squeue about one job. One line about just that job is believed, and nothing else: a comment may
/// contain a line break and imitate a second job.
pub fn look(id: JobId, ok: bool, out: &str, err: &str) -> Look {
    if !ok {
        return match err.contains("Invalid job id specified") {
            true => Look::Gone,
            false => Look::Failed(first_line(err)),
        };
    }
    let mut lines = out.lines();
    match (lines.next().and_then(Job::parse), lines.next()) {
        (Some(job), None) if job.id == id => Look::Job(job),
        _ => Look::Failed(format!("squeue shows job {id} in an unexpected form: {:?}", first_line(out))),
    }
}

/// The jobs in a list, those with a mark only. Each must be looked at by id before anything is done to it.
pub fn slices(out: &str) -> Vec<Job> {
    out.lines().filter_map(Job::parse).filter(|j| j.mark.is_some()).collect()
}

/// The first line of a text, at most 200 characters.
pub fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "12|999|RUNNING|pliant base=7 instance=ab token=t1\n";

    #[test]
    fn one_line_about_that_job() {
        let Look::Job(job) = look(JobId(12), true, LINE, "") else { panic!() };
        assert_eq!((job.uid, job.is_over(), job.mark.unwrap().base), (999, false, JobId(7)));
        let Look::Job(job) = look(JobId(12), true, "12|999|CANCELLED|a|b\n", "") else { panic!() };
        assert!(job.is_over() && job.mark.is_none());
    }

    #[test]
    fn anything_else_is_a_failure_and_never_gone() {
        for (ok, out, err) in [
            (true, "", ""),
            (true, "13|999|RUNNING|x\n", ""),
            (true, "12|999|RUNNING|x\n13|0|RUNNING|pliant base=7 instance=a token=b\n", ""),
            (true, "12|999\n", ""),
            (true, "12|999|running|x\n", ""),
            (false, LINE, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"),
            (false, "", ""),
        ] {
            assert!(matches!(look(JobId(12), ok, out, err), Look::Failed(_)), "{out:?} {err:?}");
        }
        assert_eq!(look(JobId(12), false, "", "slurm_load_jobs error: Invalid job id specified\n"), Look::Gone);
    }

    #[test]
    fn lists_keep_marked_jobs() {
        let all = slices(&format!("{LINE}13|1|PENDING|\n14|1|PENDING|pliant base=x\nrubbish\n"));
        assert_eq!(all.len(), 1);
    }
}
