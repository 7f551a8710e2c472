//! Exit codes of `pliant` and `pliant run`, in one table. `pliant run` otherwise ends with the code of the first
//! rank that failed (128 + signal where a signal ended it), or 0.

/// All is well.
pub const OK: u8 = 0;
/// It did not work; the message says why.
pub const FAILURE: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// `pliant run`: MIN or MAX do not fit the allocation, or the job is of a kind that cannot be elastic.
pub const UNFIT: u8 = 64;
/// `pliant run`: not inside a Slurm job, or the allocation has nothing to run on and none was to come.
pub const NO_WORLD: u8 = 65;
/// `pliant run`: Slurm did not answer, so that nothing could be started.
pub const SLURM: u8 = 69;
/// `pliant run`: the command could not be started.
pub const NO_COMMAND: u8 = 127;
/// `pliant run`: a base without GPUs reached its time limit without ever getting any.
pub const NEVER_STARTED: u8 = 75;

/// The table as shown in the manual: code and meaning.
pub const TABLE: &[(u8, &str)] = &[
    (OK, "success"),
    (FAILURE, "it did not work; the message says why"),
    (USAGE, "the command line is wrong"),
    (UNFIT, "run: MIN or MAX do not fit the allocation, or this kind of job cannot be elastic"),
    (NO_WORLD, "run: not inside a Slurm job, or it holds no GPU and none was asked for"),
    (SLURM, "run: Slurm did not answer and nothing could be started"),
    (NEVER_STARTED, "run: a base without GPUs reached its time limit before any GPU came"),
    (NO_COMMAND, "run: the command could not be started"),
];
