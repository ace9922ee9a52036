//! Counting and shortening of rejected updates.

use std::collections::BTreeSet;

use crate::v1;

impl v1::RefusedUpdate {
    /// Returns only the first line of the reason, because the kernel's log about a BPF program may be long.
    pub fn short_reason(&self) -> &str {
        self.reason.lines().next().unwrap_or_default()
    }
}

impl v1::LoadBalancerState {
    /// Returns the number of warnings that `coreward status` shows for faults of the machine and for rejected updates.
    /// Rejections with the same reason count once.
    pub fn warning_count(&self) -> usize {
        let distinct_refusals: BTreeSet<_> = self
            .refused
            .iter()
            .map(|refused_update| (refused_update.table, refused_update.generation, refused_update.short_reason()))
            .collect();
        self.warnings.len() + distinct_refusals.len()
    }
}
