//! Events, derived from the differences between successive states of the fleet, so that no visible change is missed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use coreward_api::types::{
    Event, EventId, KeyPhase, Overview, OverviewLoadBalancer, ServerState, Severity, SubjectKind,
};
use parking_lot::{Mutex, MutexGuard};
use rand::rand_core::{TryRng as _, UnwrapErr};
use rand::rngs::SysRng;
use tokio::sync::watch;

/// Maximum number of stored events. The oldest ones are removed.
pub const MAX_STORED_EVENTS: usize = 1000;

pub struct FleetEventLog {
    /// Random identifier of this controller run, which is part of each event's id for clients.
    controller_run_id: String,
    events: Mutex<VecDeque<Event>>,
    newest_id_sender: watch::Sender<u64>,
    last_overview: Mutex<Option<Overview>>,
}

impl Default for FleetEventLog {
    fn default() -> Self {
        let mut random_bytes = [0; 6];
        let Ok(()) = UnwrapErr(SysRng).try_fill_bytes(&mut random_bytes);
        Self {
            controller_run_id: random_bytes.map(|byte| format!("{byte:02x}")).concat(),
            events: Mutex::default(),
            newest_id_sender: watch::Sender::new(0),
            last_overview: Mutex::default(),
        }
    }
}

impl FleetEventLog {
    pub fn controller_run_id(&self) -> &str {
        &self.controller_run_id
    }

    /// Returns the newest `limit` events whose id is greater than `id`, the oldest first.
    pub fn events_after(&self, id: u64, limit: usize) -> Vec<Event> {
        let events = self.lock_events();
        let newer_event_count = events.iter().filter(|event| event.id > id).count();
        events.iter().skip(events.len() - newer_event_count.min(limit)).cloned().collect()
    }

    pub fn subscribe_to_newest_id(&self) -> watch::Receiver<u64> {
        self.newest_id_sender.subscribe()
    }

    /// Adds an event that does not follow from a change of the fleet's status. `wall_time` is the time since 1970.
    pub fn add_event(&self, (kind, event): (SubjectKind, EventId), name: &str, message: String, wall_time: Duration) {
        self.add_events(
            [NewFleetEvent {
                severity: Severity::Info,
                event_id: event,
                subject_kind: kind,
                subject_name: name.to_owned(),
                message,
            }],
            wall_time,
        );
    }

    /// Compares `overview` with that of the previous call, and records the differences as events at `wall_time` (since
    /// 1970).
    pub fn record_overview_changes(&self, overview: &Overview, wall_time: Duration) {
        let mut last_overview = self.last_overview.lock();
        let new_events = match &*last_overview {
            Some(old_overview) if old_overview == overview => return,
            Some(old_overview) => events_between(old_overview, overview),
            None => {
                let message =
                    format!("the controller has started, configuration {}", overview.configuration_generation);
                let (subject_kind, event_id) = (SubjectKind::Controller, EventId::ControllerStarted);
                vec![NewFleetEvent {
                    severity: Severity::Info,
                    event_id,
                    subject_kind,
                    subject_name: String::new(),
                    message,
                }]
            }
        };
        *last_overview = Some(overview.clone());
        self.add_events(new_events, wall_time);
    }

    fn add_events(&self, new_events: impl IntoIterator<Item = NewFleetEvent>, wall_time: Duration) {
        let mut events = self.lock_events();
        let previous_newest_id = *self.newest_id_sender.borrow();
        let mut id = previous_newest_id;
        for NewFleetEvent { severity, event_id: event, subject_kind: kind, subject_name: name, message } in new_events {
            id += 1;
            let (event_name, kind_name) = (event.name(), kind.to_string());
            match severity {
                Severity::Info => tracing::info!(event = event_name, id, kind = kind_name, name, "{message}"),
                Severity::Warning => tracing::warn!(event = event_name, id, kind = kind_name, name, "{message}"),
            }
            events.push_back(Event {
                id,
                at_unix_ms: wall_time.as_millis() as u64,
                severity,
                event,
                subject_kind: kind,
                subject_name: name,
                message,
            });
        }
        let excess_event_count = events.len().saturating_sub(MAX_STORED_EVENTS);
        events.drain(..excess_event_count);
        drop(events);
        if id > previous_newest_id {
            self.newest_id_sender.send_replace(id);
        }
    }

    fn lock_events(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NewFleetEvent {
    severity: Severity,
    event_id: EventId,
    subject_kind: SubjectKind,
    subject_name: String,
    message: String,
}

fn events_between(old_overview: &Overview, new_overview: &Overview) -> Vec<NewFleetEvent> {
    let mut new_events = NewFleetEvents(Vec::new());
    if old_overview.fleet_generation != new_overview.fleet_generation {
        let message = format!("the document of generation {} is in force", new_overview.fleet_generation);
        new_events.add_info((SubjectKind::Fleet, EventId::FleetActivated), "", message);
    }
    add_service_events(old_overview, new_overview, &mut new_events);
    add_server_events(old_overview, new_overview, &mut new_events);
    add_load_balancer_events(old_overview, new_overview, &mut new_events);
    add_key_events(old_overview, new_overview, &mut new_events);
    new_events.0
}

struct NewFleetEvents(Vec<NewFleetEvent>);

impl NewFleetEvents {
    fn add_info(&mut self, kind: (SubjectKind, EventId), name: &str, message: impl Into<String>) {
        self.push_event(Severity::Info, kind, name, message);
    }

    fn add_warning(&mut self, kind: (SubjectKind, EventId), name: &str, message: impl Into<String>) {
        self.push_event(Severity::Warning, kind, name, message);
    }

    fn push_event(
        &mut self,
        severity: Severity,
        (kind, event): (SubjectKind, EventId),
        name: &str,
        message: impl Into<String>,
    ) {
        self.0.push(NewFleetEvent {
            severity,
            event_id: event,
            subject_kind: kind,
            subject_name: name.to_owned(),
            message: message.into(),
        });
    }

    /// Adds events for warnings that begin or end. A warning in which only a number changes causes no event.
    fn add_events_for_warning_changes(
        &mut self,
        kind: SubjectKind,
        name: &str,
        old_warnings: &[String],
        new_warnings: &[String],
    ) {
        let [old, new] = [old_warnings, new_warnings].map(|warnings| -> BTreeMap<String, &String> {
            warnings.iter().map(|warning| (strip_digits(warning), warning)).collect()
        });
        for (_, warning) in new.iter().filter(|(stripped_text, _)| !old.contains_key(*stripped_text)) {
            self.add_warning((kind, EventId::WarningStarted), name, *warning);
        }
        for (_, warning) in old.iter().filter(|(stripped_text, _)| !new.contains_key(*stripped_text)) {
            self.add_info((kind, EventId::WarningEnded), name, format!("ended: {warning}"));
        }
    }
}

fn strip_digits(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

fn add_service_events(old_overview: &Overview, new_overview: &Overview, new_events: &mut NewFleetEvents) {
    let kind = SubjectKind::Service;
    let [old, new] = [old_overview, new_overview]
        .map(|overview| overview.services.iter().map(|service| (&*service.name, service)).collect::<BTreeMap<_, _>>());
    for (name, service) in &new {
        match old.get(name) {
            None => {
                let message = format!("new, at {}: {}", service.address, service.policy);
                new_events.add_info((kind, EventId::ServiceAdded), name, message);
                new_events.add_events_for_warning_changes(kind, name, &[], &service.warnings);
            }
            Some(old_service) => {
                if old_service.policy != service.policy {
                    new_events.add_info(
                        (kind, EventId::ServicePolicyChanged),
                        name,
                        format!("policy {} instead of {}", service.policy, old_service.policy),
                    );
                }
                new_events.add_events_for_warning_changes(kind, name, &old_service.warnings, &service.warnings);
            }
        }
    }
    old.keys()
        .filter(|name| !new.contains_key(*name))
        .for_each(|name| new_events.add_info((kind, EventId::ServiceRemoved), name, "left the document"));
}

fn add_server_events(old_overview: &Overview, new_overview: &Overview, new_events: &mut NewFleetEvents) {
    let kind = SubjectKind::Server;
    let [old, new] = [old_overview, new_overview]
        .map(|overview| overview.servers.iter().map(|server| (server.id, server)).collect::<BTreeMap<_, _>>());
    for (id, server) in &new {
        let Some(old_server) = old.get(id) else {
            new_events.add_info(
                (kind, EventId::ServerAdded),
                &server.name,
                format!("new, at {}: {}", server.address, server.state),
            );
            new_events.add_events_for_warning_changes(kind, &server.name, &[], &server.warnings);
            continue;
        };
        if old_server.state != server.state {
            let reason_separator = if server.state_reason.is_empty() { "" } else { ": " };
            let message =
                format!("{} (was {}){reason_separator}{}", server.state, old_server.state, server.state_reason);
            match server.state {
                ServerState::Down => new_events.add_warning((kind, EventId::ServerStateChanged), &server.name, message),
                _ => new_events.add_info((kind, EventId::ServerStateChanged), &server.name, message),
            }
        }
        if old_server.weight != server.weight {
            new_events.add_info(
                (kind, EventId::ServerWeightChanged),
                &server.name,
                format!("weight {} instead of {}", server.weight, old_server.weight),
            );
        }
        new_events.add_events_for_warning_changes(kind, &server.name, &old_server.warnings, &server.warnings);
    }
    let removed_servers = old.iter().filter(|(id, _)| !new.contains_key(*id));
    removed_servers.for_each(|(_, server)| {
        new_events.add_info((kind, EventId::ServerForgotten), &server.name, "forgotten: its id is free again")
    });
}

fn add_load_balancer_events(old_overview: &Overview, new_overview: &Overview, new_events: &mut NewFleetEvents) {
    let kind = SubjectKind::LoadBalancer;
    let describe_state = |balancer: &OverviewLoadBalancer| match (balancer.connected, balancer.alive) {
        (true, true) => "connected",
        (true, false) => "silent",
        (false, true) => "disconnected",
        (false, false) => "lost",
    };
    let [old, new] = [old_overview, new_overview]
        .map(|overview| overview.load_balancers.iter().map(|lb| (&*lb.name, lb)).collect::<BTreeMap<_, _>>());
    let load_balancer_names: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
    for name in load_balancer_names {
        match (
            old.get(name).map(|old_balancer| describe_state(old_balancer)),
            new.get(name).map(|new_balancer| describe_state(new_balancer)),
        ) {
            (old_state, Some(new_state)) if old_state != Some(new_state) => match new_state {
                "silent" | "lost" => new_events.add_warning((kind, EventId::LoadBalancerStateChanged), name, new_state),
                _ => new_events.add_info((kind, EventId::LoadBalancerStateChanged), name, new_state),
            },
            (Some(_), None) => new_events.add_info((kind, EventId::LoadBalancerForgotten), name, "forgotten"),
            _ => {}
        }
        let load_balancer_warnings = |overview: &BTreeMap<&str, &OverviewLoadBalancer>| {
            overview.get(name).map(|balancer| balancer.warnings.clone()).unwrap_or_default()
        };
        new_events.add_events_for_warning_changes(
            kind,
            name,
            &load_balancer_warnings(&old),
            &load_balancer_warnings(&new),
        );
    }
}

fn add_key_events(old_overview: &Overview, new_overview: &Overview, new_events: &mut NewFleetEvents) {
    let (old, new) = (&old_overview.keys, &new_overview.keys);
    if (old.rotation_phase, new.rotation_phase) == (KeyPhase::Steady, KeyPhase::Announced) {
        new_events.add_info(
            (SubjectKind::Keys, EventId::KeysAnnounced),
            "",
            "the next cookie key is being distributed",
        );
    }
    if old.current_key != new.current_key {
        new_events.add_info(
            (SubjectKind::Keys, EventId::KeysSwitched),
            "",
            format!("key {} stamps from now on", new.current_key),
        );
    }
}
