//! Table of all metrics. A test compares docs/metrics.md with it.

/// Daemon that serves a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// `coreward controller`
    Controller,
    /// `coreward lb`
    Lb,
    /// `coreward agent`
    Agent,
    /// `coreward dispatch`
    Dispatch,
    /// `coreward orchestrate`
    Orchestrate,
    /// `coreward rack`
    Rack,
}

impl Component {
    /// Returns the name of the command.
    pub fn name(self) -> &'static str {
        match self {
            Component::Controller => "controller",
            Component::Lb => "lb",
            Component::Agent => "agent",
            Component::Dispatch => "dispatch",
            Component::Orchestrate => "orchestrate",
            Component::Rack => "rack",
        }
    }
}

/// Kind of a metric, and the combination of its series beyond the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Counter; combined by the sum.
    Counter,
    /// Number of things; combined by the sum.
    Gauge,
    Histogram,
    /// Age, fraction or generation; combined by the largest.
    MaxGauge,
}

impl Kind {
    /// Returns Prometheus' name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
            Kind::Gauge | Kind::MaxGauge => "gauge",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    /// Daemons that serve it.
    pub parts: &'static [Component],
    /// Description.
    pub help: &'static str,
}

use Component::{Agent, Controller, Dispatch, Lb, Orchestrate, Rack};
use Kind::{Counter, Gauge, Histogram, MaxGauge};

const fn metric(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    parts: &'static [Component],
    help: &'static str,
) -> Metric {
    Metric { name, kind, labels, parts, help }
}

const ALL: &[Component] = &[Controller, Lb, Agent, Dispatch, Orchestrate, Rack];
const DISPATCHING: &[Component] = &[Controller, Agent, Dispatch];

pub const METRICS: &[Metric] = &[
    metric("coreward_build_info", Gauge, &["part", "version"], ALL, "1"),
    metric(
        "coreward_configuration_generation",
        MaxGauge,
        &[],
        &[Controller, Lb, Agent],
        "Generation of the configuration in force; 0: none yet",
    ),
    metric("coreward_reports_accepted_total", Counter, &[], &[Controller], "Reports of agents that were taken"),
    metric(
        "coreward_reports_refused_total",
        Counter,
        &["reason"],
        &[Controller],
        "Reports that were refused, by reason",
    ),
    metric(
        "coreward_servers_limited",
        Gauge,
        &[],
        &[Controller],
        "Servers that took more than twice their fair part of new connections, and are limited to that",
    ),
    metric(
        "coreward_tls_handshake_failures_total",
        Counter,
        &["reason"],
        &[Controller, Rack],
        "Connections that did not come about, by reason",
    ),
    metric(
        "coreward_certificate_not_after_timestamp_seconds",
        MaxGauge,
        &["certificate"],
        &[Controller, Lb, Agent, Rack],
        "When the part's own certificate (own), and the first of its authorities' (ca), ends: since 1970",
    ),
    metric(
        "coreward_table_generation",
        MaxGauge,
        &["service"],
        &[Controller, Lb],
        "Generation of the newest placement table; at a load balancer of the one in force",
    ),
    metric("coreward_table_age_seconds", MaxGauge, &["service"], &[Controller], "Age of the newest placement table"),
    metric(
        "coreward_table_build_delay_seconds",
        Histogram,
        &[],
        &[Controller],
        "From a server's newest report to the tables that have it",
    ),
    metric(
        "coreward_store_writable",
        Gauge,
        &[],
        &[Controller],
        "1: the last write to the store succeeded; 0: nothing can be changed now",
    ),
    metric(
        "coreward_store_writes_total",
        Counter,
        &["result"],
        &[Controller],
        "Writes to the store, `written` or `failed`",
    ),
    metric(
        "coreward_reloads_total",
        Counter,
        &["result"],
        &[Controller],
        "Times that the files were read again by SIGHUP, `in-force` or `refused`",
    ),
    metric(
        "coreward_fleet_file_refused",
        Gauge,
        &[],
        &[Controller],
        "1: the fleet's file was wrong when it was read last, and an older document is in force",
    ),
    metric(
        "coreward_store_has_document",
        Gauge,
        &[],
        &[Controller],
        "0: no document was applied yet, and no configuration is sent",
    ),
    metric("coreward_store_behind", Gauge, &[], &[Controller], "1: a load balancer had a newer configuration"),
    metric(
        "coreward_generation_lag",
        MaxGauge,
        &["part", "name"],
        &[Controller],
        "Generations of the configuration that a load balancer (lb) or server (agent) is behind",
    ),
    metric(
        "coreward_refused_updates",
        Gauge,
        &["part", "name"],
        &[Controller],
        "Parts of the newest updates that a load balancer (lb) or server (agent) cannot use; what it had stays in force",
    ),
    metric(
        "coreward_reports_ahead_total",
        Counter,
        &[],
        &[Controller],
        "Reports that were sent more than a second ahead of the controller's wall clock",
    ),
    metric(
        "coreward_api_requests_total",
        Counter,
        &["status"],
        &[Controller],
        "Requests to the HTTP API by the status of their answers: 401, 403 and 429 are refusals",
    ),
    metric(
        "coreward_controller_is_leader",
        Gauge,
        &[],
        &[Controller],
        "1: this controller leads; 0: another one does, or none",
    ),
    metric(
        "coreward_leader_term",
        Gauge,
        &[],
        &[Controller],
        "The leader's term, which grows with every leader; only where there is etcd, and at the leader",
    ),
    metric(
        "coreward_leader_lease_seconds",
        Gauge,
        &[],
        &[Controller],
        "How long the leader leads unless etcd renews its lease; only where there is etcd, and at the leader",
    ),
    metric(
        "coreward_etcd_request_seconds",
        Histogram,
        &[],
        &[Controller],
        "How long etcd took to answer; only where there is etcd",
    ),
    metric(
        "coreward_table_propagation_seconds",
        Histogram,
        &[],
        &[Controller],
        "From the receipt of a report that makes a table due to a load balancer's word that the table is in force",
    ),
    metric(
        "coreward_report_sent_to_kernel_seconds",
        Histogram,
        &[],
        &[Controller],
        "The same from when the agent sent it: by two machines' wall clocks",
    ),
    metric("coreward_servers", Gauge, &["state"], &[Controller], "Servers, by state"),
    metric("coreward_service_servers", Gauge, &["service", "state"], &[Controller], "Servers of a service, by state"),
    metric(
        "coreward_service_failing_open",
        Gauge,
        &["service"],
        &[Controller],
        "1: all servers of the service are down, and get new connections all the same",
    ),
    metric(
        "coreward_server_report_age_seconds",
        MaxGauge,
        &["server"],
        &[Controller],
        "Age of the newest report; not of servers that never reported",
    ),
    metric(
        "coreward_server_core_load_ratio",
        MaxGauge,
        &["server", "core"],
        &[Controller],
        "Smoothed load of a core, of its capacity",
    ),
    metric("coreward_server_open_connections", Gauge, &["server"], &[Controller], "TCP connections of its services"),
    metric(
        "coreward_server_service_connections",
        Gauge,
        &["server", "service"],
        &[Controller],
        "TCP connections of a service at a server, as its agent last counted them; absent: not known",
    ),
    metric(
        "coreward_server_drained",
        Gauge,
        &["server"],
        &[Controller],
        "1: drained by `coreward drain`; 0: not, or by the fleet's document",
    ),
    metric(
        "coreward_server_syns_total",
        Counter,
        &["server", "queue"],
        &[Controller, Agent],
        "SYNs that came by the receive queue that RSS predicts (predicted), or by another (other)",
    ),
    metric(
        "coreward_server_packets_total",
        Counter,
        &["server", "outcome"],
        &[Controller, Agent],
        "What a server's programs did, by outcome",
    ),
    metric(
        "coreward_server_warnings",
        Gauge,
        &["server"],
        &[Controller, Agent],
        "What the agent finds wrong; `coreward status` has the words",
    ),
    metric("coreward_load_balancers", Gauge, &["state"], &[Controller], "Load balancers, alive or lost"),
    metric("coreward_cookie_key_age_seconds", MaxGauge, &[], &[Controller], "How long the cookie key has stamped"),
    metric(
        "coreward_lb_packets_total",
        Counter,
        &["load_balancer", "decision"],
        &[Controller, Lb],
        "Packets that were forwarded or passed on, by kind of decision",
    ),
    metric(
        "coreward_lb_drops_total",
        Counter,
        &["load_balancer", "reason"],
        &[Controller, Lb],
        "Packets that were dropped, by reason",
    ),
    metric(
        "coreward_lb_events_total",
        Counter,
        &["load_balancer", "event"],
        &[Controller, Lb],
        "What else happened to packets",
    ),
    metric(
        "coreward_lb_connections",
        Gauge,
        &["load_balancer"],
        &[Controller, Lb],
        "Connections in the connection table",
    ),
    metric(
        "coreward_lb_unresolved_servers",
        Gauge,
        &["load_balancer"],
        &[Controller, Lb],
        "Servers whose MAC address is not known",
    ),
    metric(
        "coreward_lb_warnings",
        Gauge,
        &["load_balancer"],
        &[Controller, Lb],
        "Faults of the machine, and refused updates",
    ),
    metric(
        "coreward_lb_send_drops_total",
        Counter,
        &[],
        &[Lb],
        "Frames sent by XDP that the driver dropped, by its counters",
    ),
    metric(
        "coreward_lb_masked_servers",
        Gauge,
        &[],
        &[Lb],
        "Servers that get no new connections from here: this load balancer's checks find them down",
    ),
    metric(
        "coreward_lb_expired_tables",
        Gauge,
        &[],
        &[Lb],
        "Services whose placement table has expired: new connections go by this load balancer's own counts",
    ),
    metric(
        "coreward_lb_announced_vips",
        Gauge,
        &[],
        &[Lb],
        "VIPs announced to the routers; only where there is [announce]",
    ),
    metric(
        "coreward_lb_service_packets_total",
        Counter,
        &["service", "decision"],
        &[Lb],
        "Packets of a service that were forwarded or passed on, by kind of decision",
    ),
    metric(
        "coreward_lb_service_drops_total",
        Counter,
        &["service", "reason"],
        &[Lb],
        "Packets of a service that were dropped, by reason",
    ),
    metric(
        "coreward_lb_service_forwarded_bytes_total",
        Counter,
        &["service"],
        &[Lb],
        "Frame bytes of a service's packets that were forwarded",
    ),
    metric(
        "coreward_lb_service_handshakes_fail",
        Gauge,
        &["service"],
        &[Lb],
        "1: most new TCP connections do not become established",
    ),
    metric(
        "coreward_lb_table_install_seconds",
        Histogram,
        &[],
        &[Lb],
        "From a table that has come to the table in force",
    ),
    metric(
        "coreward_health_checks_total",
        Counter,
        &["service", "outcome"],
        &[Lb],
        "Health checks of a service's servers, passed or failed",
    ),
    metric(
        "coreward_health_servers",
        Gauge,
        &["service", "verdict"],
        &[Lb],
        "Servers of a service that this load balancer finds up or down, or of which it knows too little",
    ),
    metric(
        "coreward_health_check_duration_max_seconds",
        MaxGauge,
        &["service"],
        &[Lb],
        "How long the slowest server's newest answer to a health check took",
    ),
    metric("coreward_agent_reports_total", Counter, &[], &[Agent], "Reports that this process made"),
    metric(
        "coreward_agent_core_busy_seconds_total",
        Counter,
        &["core"],
        &[Agent],
        "Busy time of a core, by receive queue",
    ),
    metric("coreward_agent_open_connections", Gauge, &[], &[Agent], "TCP connections of its services"),
    metric(
        "coreward_dispatch_outstanding_requests",
        Gauge,
        &["server", "service", "worker"],
        DISPATCHING,
        "Requests without a response so far",
    ),
    metric(
        "coreward_dispatch_queued_datagrams",
        Gauge,
        &["server", "service", "worker"],
        DISPATCHING,
        "Datagrams that waited in a worker's queue at the last look",
    ),
    metric(
        "coreward_dispatch_dispatched_total",
        Counter,
        &["server", "service", "worker"],
        DISPATCHING,
        "Requests given to a worker",
    ),
    metric(
        "coreward_dispatch_completed_total",
        Counter,
        &["server", "service", "worker"],
        DISPATCHING,
        "Requests that a worker answered",
    ),
    metric(
        "coreward_dispatch_abandoned_total",
        Counter,
        &["server", "service", "worker"],
        DISPATCHING,
        "Requests given up: without a response, dropped, or their worker died",
    ),
    metric(
        "coreward_dispatch_dropped_total",
        Counter,
        &["server", "service", "worker"],
        DISPATCHING,
        "Datagrams that a worker's full receive buffer dropped",
    ),
    metric(
        "coreward_orchestrate_requests_total",
        Counter,
        &["service", "outcome"],
        &[Orchestrate],
        "Requests of a service, by its number: received, dropped, rejected, completed, lost",
    ),
    metric(
        "coreward_orchestrate_waiting_requests",
        Gauge,
        &["service"],
        &[Orchestrate],
        "Requests of a service that no core takes",
    ),
    metric(
        "coreward_orchestrate_outstanding_requests",
        Gauge,
        &["service"],
        &[Orchestrate],
        "Requests of a service that cores have",
    ),
    metric("coreward_orchestrate_workers", Gauge, &[], &[Orchestrate], "Workers that are attached"),
    metric(
        "coreward_orchestrate_events_total",
        Counter,
        &["event"],
        &[Orchestrate],
        "Events of workers, messages and datagrams, by kind",
    ),
    metric(
        "coreward_rack_controller_connected",
        Gauge,
        &[],
        &[Rack],
        "1: the rack follows a controller; 0: it looks for one",
    ),
    metric("coreward_rack_agents", Gauge, &[], &[Rack], "Agents that are connected"),
];
