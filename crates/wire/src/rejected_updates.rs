//! Counting and shortening of rejected updates.

use std::collections::BTreeSet;

use crate::v1;

impl v1::RejectedUpdate {
    /// Returns the first line of the reason for the rejection. Later lines may be a long log of the kernel about a BPF
    /// program.
    pub fn first_line_of_reason(&self) -> &str {
        self.reason.lines().next().unwrap_or_default()
    }
}

impl v1::LoadBalancerState {
    /// Returns the number of warnings in `coreward status` about faults of the load balancer's machine and rejected
    /// updates. Equal rejections count once.
    pub fn warning_count(&self) -> usize {
        let distinct_rejections: BTreeSet<_> = self
            .rejected
            .iter()
            .map(|rejected_update| {
                (rejected_update.table, rejected_update.generation, rejected_update.first_line_of_reason())
            })
            .collect();
        self.warnings.len() + distinct_rejections.len()
    }
}
