//! Stores unusable updates, which are reported to the controller while the previous state remains.

use std::collections::BTreeMap;

use coreward_wire::v1::RefusedUpdate;

/// Logs a rejected update. `refused_update` is the report to the controller, or `None` if nothing is reported.
pub fn log_rejection(kind: &str, refused_update: Option<&RefusedUpdate>, error: &str) {
    tracing::warn!(
        event = "update-rejected",
        kind,
        generation = refused_update.map(|update| update.generation),
        service = refused_update.map(|update| update.service.as_str()),
        error,
        "the load balancer rejects an update of the controller and keeps its previous state"
    );
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusalSubject {
    WholeConfiguration,
    ServiceWithIndex(u32),
    TableOfService(u32),
}

#[derive(Debug, Default)]
pub struct RefusedUpdates(BTreeMap<RefusalSubject, RefusedUpdate>);

impl RefusedUpdates {
    /// Records an unusable update. Logs it only if its subject or reason is new, because tables arrive ten times a
    /// second.
    pub fn record_refusal(&mut self, subject: RefusalSubject, refused_update: RefusedUpdate) {
        let has_same_reason = |previous_update: &RefusedUpdate| {
            previous_update.service == refused_update.service && previous_update.reason == refused_update.reason
        };
        if !self.0.get(&subject).is_some_and(has_same_reason) {
            let kind = if refused_update.table { "table" } else { "configuration" };
            log_rejection(kind, Some(&refused_update), &refused_update.reason);
        }
        self.0.insert(subject, refused_update);
    }

    /// Records that the subject's newest update is usable.
    pub fn clear_refusal(&mut self, subject: RefusalSubject) {
        self.0.remove(&subject);
    }

    pub fn remove_service(&mut self, service_index: u32) {
        self.0.remove(&RefusalSubject::ServiceWithIndex(service_index));
        self.0.remove(&RefusalSubject::TableOfService(service_index));
    }

    /// Removes all refused updates before a complete configuration is applied, except tables of services for which
    /// `is_service` returns true.
    pub fn retain_tables(&mut self, is_service: impl Fn(u32) -> bool) {
        self.0.retain(|subject, _| matches!(subject, RefusalSubject::TableOfService(index) if is_service(*index)));
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_service_refused(&self, service_index: u32) -> bool {
        self.0.contains_key(&RefusalSubject::ServiceWithIndex(service_index))
    }

    pub fn all_refused_updates(&self) -> Vec<RefusedUpdate> {
        self.0.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_lasts_until_the_next_update_of_its_subject() {
        let new_refusal = |service: &str, generation, table| RefusedUpdate {
            service: service.into(),
            generation,
            reason: "unknown".into(),
            table,
        };
        let mut refusals = RefusedUpdates::default();
        refusals.record_refusal(RefusalSubject::ServiceWithIndex(1), new_refusal("web", 3, false));
        refusals.record_refusal(RefusalSubject::TableOfService(1), new_refusal("web", 8, true));
        refusals.record_refusal(RefusalSubject::TableOfService(1), new_refusal("web", 9, true));
        refusals.record_refusal(RefusalSubject::ServiceWithIndex(2), new_refusal("dns", 3, false));
        assert_eq!(
            refusals.all_refused_updates(),
            [new_refusal("web", 3, false), new_refusal("dns", 3, false), new_refusal("web", 9, true)]
        );
        refusals.clear_refusal(RefusalSubject::ServiceWithIndex(1));
        assert_eq!(refusals.all_refused_updates(), [new_refusal("dns", 3, false), new_refusal("web", 9, true)]);
        refusals.retain_tables(|index| index == 1);
        assert_eq!(refusals.all_refused_updates(), [new_refusal("web", 9, true)]);
        refusals.retain_tables(|_| false);
        assert_eq!(refusals.all_refused_updates(), []);
        refusals.record_refusal(RefusalSubject::ServiceWithIndex(2), new_refusal("dns", 3, false));
        refusals.record_refusal(RefusalSubject::TableOfService(2), new_refusal("dns", 3, true));
        assert!(refusals.is_service_refused(2) && !refusals.is_service_refused(1));
        refusals.remove_service(2);
        assert_eq!(refusals.all_refused_updates(), []);
    }
}
