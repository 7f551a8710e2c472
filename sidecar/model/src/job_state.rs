//! Slurm's job states as squeue and scontrol write them in full.

/// Whether a job in that state has ended: it holds nothing and never will. COMPLETING is not among them, since such a
/// job still holds its nodes.
pub fn is_over(state: &str) -> bool {
    matches!(
        state,
        "CANCELLED"
            | "COMPLETED"
            | "FAILED"
            | "TIMEOUT"
            | "NODE_FAIL"
            | "PREEMPTED"
            | "BOOT_FAIL"
            | "DEADLINE"
            | "OUT_OF_MEMORY"
            | "REVOKED"
    )
}

#[cfg(test)]
mod tests {
    use super::is_over;

    #[test]
    fn what_still_holds_something_is_not_over() {
        assert!(is_over("PREEMPTED"));
        for state in ["RUNNING", "PENDING", "SUSPENDED", "COMPLETING", "CONFIGURING", ""] {
            assert!(!is_over(state), "{state}");
        }
    }
}
