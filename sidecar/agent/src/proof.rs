//! To which Slurm job a process belongs, read from /proc. Nothing is taken from what the process says.
//!
//! First its cgroup, where Slurm keeps one per job; then its parents up to the `slurmstepd` that started it. What a
//! user could imitate does not count: a cgroup path has to begin where only root can make one, and a slurmstepd is
//! known by its real uid and its program file, not by its name (a user may run a setuid program under any name).

use pliant_model::JobId;
use std::path::{Path, PathBuf};

/// The most parents that are looked at; deeper process trees are refused.
const MAX_DEPTH: usize = 64;

/// A peer of the socket that is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process that connected.
    pub pid: u32,
    /// Its effective uid.
    pub uid: u32,
    /// The job that it belongs to.
    pub job: JobId,
}

/// What showed the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The process's cgroup.
    Cgroup,
    /// A parent that is a slurmstepd.
    Parent,
    /// slurmd's own look-up (`scontrol pidinfo`).
    Slurmd,
}

/// Why a process is not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProofError {
    /// It has ended meanwhile.
    #[error("process {0} has ended")]
    Ended(u32),
    /// The process under that pid is another user's: the pid has been used again.
    #[error("process {pid} runs under uid {found}, its connection was made by uid {expected}")]
    OtherUid {
        /// Process.
        pid: u32,
        /// Now.
        found: u32,
        /// When it connected.
        expected: u32,
    },
    /// It sits in the cgroup of a job of somebody else.
    #[error("process {pid} of uid {uid} is in a job of uid {owner}")]
    OtherJob {
        /// Process.
        pid: u32,
        /// Its uid.
        uid: u32,
        /// The job's.
        owner: u32,
    },
    /// Neither its cgroup nor its parents nor slurmd know of a job.
    #[error("process {0} belongs to no Slurm job on this node")]
    NoJob(u32),
    /// The last resort was used by this uid a moment ago.
    #[error("process {0} could not be found in a Slurm job at once; try again in some seconds")]
    Later(u32),
}

/// The process table.
#[derive(Clone, Debug)]
pub struct Processes {
    root: PathBuf,
    node: String,
}

impl Processes {
    /// `root` is /proc; `node` is the NodeName, which is part of the paths of cgroups where slurmd was started with
    /// `-N`.
    pub fn new(root: impl Into<PathBuf>, node: &str) -> Self {
        Processes { root: root.into(), node: node.to_owned() }
    }

    fn read(&self, pid: u32, file: &str) -> Option<String> {
        let path = self.root.join(pid.to_string()).join(file);
        std::fs::read(path).ok().map(|b| String::from_utf8_lossy(&b).into_owned())
    }

    /// When a process was started (in ticks since boot); tells a used-again pid from the old one.
    pub fn started(&self, pid: u32) -> Option<u64> {
        Some(self.stat(pid)?.1)
    }

    /// The state letter of a process and when it was started (in ticks since boot); `None`: there is none.
    pub fn stat(&self, pid: u32) -> Option<(char, u64)> {
        // The name in parentheses may itself contain blanks and parentheses.
        let stat = self.read(pid, "stat")?;
        let mut rest = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        Some((rest.next()?.chars().next()?, rest.nth(18)?.parse().ok()?))
    }

    /// Whether a process runs (a zombie does not).
    pub fn alive(&self, pid: u32) -> bool {
        self.stat(pid).is_some_and(|(s, _)| !matches!(s, 'Z' | 'X'))
    }

    /// The effective uid of a process.
    pub fn owner(&self, pid: u32) -> Option<u32> {
        Some(Ids::parse(&self.read(pid, "status")?)?.effective)
    }

    /// The CPUs that a process may use, ascending.
    pub fn cpus(&self, pid: u32) -> Option<Vec<u32>> {
        let status = self.read(pid, "status")?;
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
        pliant_model::conf::index_list::parse(list.trim()).ok()
    }

    /// A variable of the environment that a process was started with. It is the user's own word: fit for a hint, never
    /// for a proof.
    pub fn variable(&self, pid: u32, name: &str) -> Option<String> {
        let environment = self.read(pid, "environ")?;
        let value = |v: &str| v.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        environment.split('\0').find_map(value)
    }

    /// The job of a process that connected as `uid`; `Ok(None)`: neither cgroup nor parents tell.
    ///
    /// # Errors
    /// The process has ended, or is not that uid's.
    pub fn job_of(&self, pid: u32, uid: u32) -> Result<Option<(JobId, Evidence)>, ProofError> {
        let status = self.read(pid, "status").ok_or(ProofError::Ended(pid))?;
        let ids = Ids::parse(&status).ok_or(ProofError::Ended(pid))?;
        if ids.effective != uid {
            return Err(ProofError::OtherUid { pid, found: ids.effective, expected: uid });
        }
        let cgroup = self.read(pid, "cgroup").unwrap_or_default();
        if let Some((job, owner)) = job_of_cgroup(&cgroup, &self.node) {
            return match owner {
                Some(owner) if owner != uid => Err(ProofError::OtherJob { pid, uid, owner }),
                _ => Ok(Some((job, Evidence::Cgroup))),
            };
        }
        let mut parent = ids.parent;
        for _ in 0..MAX_DEPTH {
            if parent <= 1 {
                break;
            }
            if let Some(job) = self.stepd_job(parent) {
                return Ok(Some((job, Evidence::Parent)));
            }
            match self.read(parent, "status").and_then(|s| Ids::parse(&s)) {
                Some(ids) => parent = ids.parent,
                None => break,
            }
        }
        Ok(None)
    }

    /// The job of a slurmstepd; `None`: the process is none.
    fn stepd_job(&self, pid: u32) -> Option<JobId> {
        let ids = Ids::parse(&self.read(pid, "status")?)?;
        // slurmstepd sets its effective uid to the user's at times, never its real one.
        if ids.real != 0 {
            return None;
        }
        let program = std::fs::read_link(self.root.join(pid.to_string()).join("exe")).ok()?;
        is_stepd(&program).then(|| job_of_title(&self.read(pid, "cmdline")?)).flatten()
    }
}

struct Ids {
    parent: u32,
    real: u32,
    effective: u32,
}

impl Ids {
    fn parse(status: &str) -> Option<Ids> {
        let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name));
        let mut uids = field("Uid:")?.split_ascii_whitespace().map(str::parse);
        let (real, effective) = (uids.next()?.ok()?, uids.next()?.ok()?);
        Some(Ids { parent: field("PPid:")?.trim().parse().ok()?, real, effective })
    }
}

/// `slurmstepd`, `slurmstepd-wlm` (Debian), and either of them after a package update has replaced the file.
fn is_stepd(program: &Path) -> bool {
    let name = program.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.strip_suffix(" (deleted)").unwrap_or(&name);
    matches!(name, "slurmstepd" | "slurmstepd-wlm")
}

/// The job in the title of a slurmstepd: `slurmstepd: [12.0]`, `slurmstepd: [12.batch]`.
fn job_of_title(cmdline: &str) -> Option<JobId> {
    let title = cmdline.split('\0').next()?;
    let inner = title.strip_prefix("slurmstepd: [")?.split(']').next()?;
    number(inner.split(['.', '+']).next()?).map(JobId)
}

/// The job, and its owner where the path has it, in a process's cgroups.
///
/// v1: `/slurm[_NODE]/uid_U/job_J/step_S/…`; v2: `/system.slice/[NODE_]slurmstepd.scope/job_J/step_S/…`. Only from the
/// root on: below user.slice users may make cgroups of any name. systemd's own v1 hierarchy is left out.
pub fn job_of_cgroup(text: &str, node: &str) -> Option<(JobId, Option<u32>)> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let mut parts = path.strip_prefix('/')?.split('/');
        if controllers.is_empty() {
            let scope = (parts.next()? == "system.slice").then(|| parts.next()).flatten()?;
            let own = scope == "slurmstepd.scope" || scope == format!("{node}_slurmstepd.scope");
            let job = own.then(|| parts.next()).flatten()?;
            return Some((JobId(number(job.strip_prefix("job_")?)?), None));
        }
        if controllers.starts_with("name=") {
            return None;
        }
        let root = parts.next()?;
        if root != "slurm" && root != format!("slurm_{node}") {
            return None;
        }
        let owner = number(parts.next()?.strip_prefix("uid_")?)?;
        Some((JobId(number(parts.next()?.strip_prefix("job_")?)?), Some(owner)))
    })
}

/// The job in the answer of `scontrol pidinfo`: `Slurm job id 12 ends at …`.
pub fn job_of_pidinfo(text: &str) -> Option<JobId> {
    let rest = text.lines().find_map(|l| l.trim().strip_prefix("Slurm job id "))?;
    number(rest.split_ascii_whitespace().next()?).map(JobId)
}

fn number(text: &str) -> Option<u32> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes() -> (tempfile::TempDir, Processes) {
        let dir = tempfile::tempdir().unwrap();
        let processes = Processes::new(dir.path(), "n0");
        (dir, processes)
    }

    fn add(dir: &tempfile::TempDir, pid: u32, parent: u32, uid: (u32, u32), exe: &str, cmdline: &str, cgroup: &str) {
        let path = dir.path().join(pid.to_string());
        std::fs::create_dir(&path).unwrap();
        let status = format!("Name:\tx\nPPid:\t{parent}\nUid:\t{}\t{}\t{}\t{}\n", uid.0, uid.1, uid.1, uid.1);
        std::fs::write(path.join("status"), status).unwrap();
        std::fs::write(path.join("cmdline"), cmdline).unwrap();
        std::fs::write(path.join("cgroup"), cgroup).unwrap();
        std::fs::write(path.join("stat"), format!("{pid} (a ) b) S 1 {} 77 0", "0 ".repeat(17))).unwrap();
        std::os::unix::fs::symlink(exe, path.join("exe")).unwrap();
    }

    #[test]
    fn cgroups_of_both_kinds() {
        let v1 = "9:name=systemd:/\n6:freezer:/slurm_n0/uid_999/job_12/step_batch\n0::/\n";
        assert_eq!(job_of_cgroup(v1, "n0"), Some((JobId(12), Some(999))));
        assert_eq!(job_of_cgroup(v1, "n1"), None, "another node on the same host");
        assert_eq!(job_of_cgroup("4:memory:/slurm/uid_5/job_7/step_0/task_0\n", "x"), Some((JobId(7), Some(5))));
        let v2 = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n";
        assert_eq!(job_of_cgroup(v2, "n0"), Some((JobId(42), None)));
        let v2 = "0::/system.slice/n0_slurmstepd.scope/job_42/step_0/user/task_0\n";
        assert_eq!(job_of_cgroup(v2, "n0"), Some((JobId(42), None)));
    }

    #[test]
    fn cgroups_that_a_user_can_make_do_not_count() {
        for path in [
            "0::/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000/job_1/step_0",
            "0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_1/step_0",
            "1:name=systemd:/slurm/uid_1000/job_1/step_0",
            "4:memory:/user.slice/slurm/uid_1000/job_1",
            "0::/slurm/uid_1000/job_1",
            "4:memory:/slurm/uid_1000/job_",
            "4:memory:/slurm/uid_-1/job_+3",
        ] {
            assert_eq!(job_of_cgroup(path, "n0"), None, "{path}");
        }
    }

    #[test]
    fn the_nearest_slurmstepd_above_decides() {
        let (dir, p) = processes();
        add(&dir, 10, 1, (0, 0), "/usr/sbin/slurmd", "slurmd", "0::/");
        add(&dir, 11, 10, (0, 0), "/usr/sbin/slurmstepd-wlm", "slurmstepd: [77.batch]\0", "0::/");
        add(&dir, 12, 11, (1000, 1000), "/bin/bash", "bash", "0::/");
        add(&dir, 13, 12, (1000, 1000), "/usr/bin/python3", "python", "0::/");
        assert_eq!(p.job_of(13, 1000), Ok(Some((JobId(77), Evidence::Parent))));
        assert_eq!(p.job_of(10, 0), Ok(None));
        assert_eq!(p.started(13), Some(77));
        assert!(p.alive(13) && !p.alive(99));
        assert_eq!(p.job_of(99, 1000), Err(ProofError::Ended(99)));
        assert_eq!(p.job_of(13, 1001), Err(ProofError::OtherUid { pid: 13, found: 1000, expected: 1001 }));
    }

    #[test]
    fn a_false_slurmstepd_is_not_believed() {
        let (dir, p) = processes();
        // su under a borrowed name: effective root, real uid the user's; and sudo, which is root altogether.
        add(&dir, 20, 1, (1000, 0), "/usr/bin/su", "slurmstepd: [77.0]", "0::/");
        add(&dir, 21, 20, (1000, 1000), "/bin/bash", "bash", "0::/");
        add(&dir, 22, 1, (0, 0), "/usr/bin/sudo", "slurmstepd: [77.0]", "0::/");
        add(&dir, 23, 22, (1000, 1000), "/bin/bash", "bash", "0::/");
        add(&dir, 24, 1, (1000, 1000), "/home/u/slurmstepd", "slurmstepd: [77.0]", "0::/");
        add(&dir, 25, 24, (1000, 1000), "/bin/bash", "bash", "0::/");
        for pid in [21, 23, 25] {
            assert_eq!(p.job_of(pid, 1000), Ok(None), "{pid}");
        }
    }

    #[test]
    fn a_process_in_somebody_elses_job_is_refused() {
        let (dir, p) = processes();
        add(&dir, 30, 1, (1000, 1000), "/bin/bash", "bash", "4:memory:/slurm/uid_5/job_7/step_0\n");
        assert_eq!(p.job_of(30, 1000), Err(ProofError::OtherJob { pid: 30, uid: 1000, owner: 5 }));
    }

    #[test]
    fn titles_and_pidinfo() {
        assert_eq!(job_of_title("slurmstepd: [12.interactive]\0\0"), Some(JobId(12)));
        assert_eq!(job_of_title("slurmstepd: [12+1.0]"), Some(JobId(12)));
        assert_eq!(job_of_title("slurmstepd infinity\0"), None);
        assert_eq!(
            job_of_pidinfo("Slurm job id 31 ends at Mon Nov 30 23:00:00 2026\nslurm_get_rem_time is 1"),
            Some(JobId(31))
        );
        assert_eq!(job_of_pidinfo("Failed to locate job for requested pid"), None);
    }
}
