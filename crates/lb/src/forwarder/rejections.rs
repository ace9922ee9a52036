//! Stores unusable updates, which are reported to the controller while the previous state remains.

use std::collections::BTreeMap;

use coreward_wire::v1::RejectedUpdate;

/// Logs a rejected update. `rejected_update` is the report to the controller, or `None` if nothing is reported.
pub fn log_rejection(kind: &str, rejected_update: Option<&RejectedUpdate>, error: &str) {
    tracing::warn!(
        event = "update-rejected",
        kind,
        generation = rejected_update.map(|update| update.generation),
        service = rejected_update.map(|update| update.service.as_str()),
        error,
        "the load balancer rejects an update of the controller and keeps its previous state"
    );
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RejectedUpdateSubject {
    WholeConfiguration,
    ServiceWithIndex(u32),
    TableOfService(u32),
}

#[derive(Debug, Default)]
pub struct RejectedUpdates(BTreeMap<RejectedUpdateSubject, RejectedUpdate>);

impl RejectedUpdates {
    /// Records an unusable update. Logs it only if its subject or reason is new, because tables arrive ten times a
    /// second.
    pub fn record_rejection(&mut self, subject: RejectedUpdateSubject, rejected_update: RejectedUpdate) {
        let has_same_reason = |previous_update: &RejectedUpdate| {
            previous_update.service == rejected_update.service && previous_update.reason == rejected_update.reason
        };
        if !self.0.get(&subject).is_some_and(has_same_reason) {
            let kind = if rejected_update.table { "table" } else { "configuration" };
            log_rejection(kind, Some(&rejected_update), &rejected_update.reason);
        }
        self.0.insert(subject, rejected_update);
    }

    /// Records that the subject's newest update is usable.
    pub fn clear_rejection(&mut self, subject: RejectedUpdateSubject) {
        self.0.remove(&subject);
    }

    pub fn clear_service_rejections(&mut self, service_index: u32) {
        self.0.remove(&RejectedUpdateSubject::ServiceWithIndex(service_index));
        self.0.remove(&RejectedUpdateSubject::TableOfService(service_index));
    }

    /// Removes the records of rejected updates before a complete configuration is applied. Keeps those of rejected
    /// tables if `is_service` returns true for the table's service.
    pub fn retain_table_rejections(&mut self, is_service: impl Fn(u32) -> bool) {
        self.0
            .retain(|subject, _| matches!(subject, RejectedUpdateSubject::TableOfService(index) if is_service(*index)));
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_service_rejected(&self, service_index: u32) -> bool {
        self.0.contains_key(&RejectedUpdateSubject::ServiceWithIndex(service_index))
    }

    pub fn rejected_updates(&self) -> Vec<RejectedUpdate> {
        self.0.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_lasts_until_the_next_update_of_its_subject() {
        let new_rejected_update = |service: &str, generation, table| RejectedUpdate {
            service: service.into(),
            generation,
            reason: "unknown".into(),
            table,
        };
        let mut rejections = RejectedUpdates::default();
        rejections.record_rejection(RejectedUpdateSubject::ServiceWithIndex(1), new_rejected_update("web", 3, false));
        rejections.record_rejection(RejectedUpdateSubject::TableOfService(1), new_rejected_update("web", 8, true));
        rejections.record_rejection(RejectedUpdateSubject::TableOfService(1), new_rejected_update("web", 9, true));
        rejections.record_rejection(RejectedUpdateSubject::ServiceWithIndex(2), new_rejected_update("dns", 3, false));
        assert_eq!(
            rejections.rejected_updates(),
            [
                new_rejected_update("web", 3, false),
                new_rejected_update("dns", 3, false),
                new_rejected_update("web", 9, true)
            ]
        );
        rejections.clear_rejection(RejectedUpdateSubject::ServiceWithIndex(1));
        assert_eq!(
            rejections.rejected_updates(),
            [new_rejected_update("dns", 3, false), new_rejected_update("web", 9, true)]
        );
        rejections.retain_table_rejections(|index| index == 1);
        assert_eq!(rejections.rejected_updates(), [new_rejected_update("web", 9, true)]);
        rejections.retain_table_rejections(|_| false);
        assert_eq!(rejections.rejected_updates(), []);
        rejections.record_rejection(RejectedUpdateSubject::ServiceWithIndex(2), new_rejected_update("dns", 3, false));
        rejections.record_rejection(RejectedUpdateSubject::TableOfService(2), new_rejected_update("dns", 3, true));
        assert!(rejections.is_service_rejected(2) && !rejections.is_service_rejected(1));
        rejections.clear_service_rejections(2);
        assert_eq!(rejections.rejected_updates(), []);
    }
}
