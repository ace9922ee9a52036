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
    metric("coreward_reports_accepted_total", Counter, &[], &[Controller], "Reports accepted"),
    metric("coreward_reports_refused_total", Counter, &["reason"], &[Controller], "Reports rejected, by reason"),
    metric(
        "coreward_servers_limited",
        Gauge,
        &[],
        &[Controller],
        "Servers limited to twice their fair share of new connections",
    ),
    metric(
        "coreward_tls_handshake_failures_total",
        Counter,
        &["reason"],
        &[Controller, Rack],
        "Connections that failed at TLS, by reason",
    ),
    metric(
        "coreward_certificate_not_after_timestamp_seconds",
        MaxGauge,
        &["certificate"],
        &[Controller, Lb, Agent, Rack],
        "End of the daemon's own certificate (own), and of the first authority's (ca), in Unix time",
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
        "Time from a server's newest report to the tables that contain it",
    ),
    metric(
        "coreward_store_writable",
        Gauge,
        &[],
        &[Controller],
        "1: the last write to the store succeeded; 0: changes fail",
    ),
    metric(
        "coreward_store_writes_total",
        Counter,
        &["result"],
        &[Controller],
        "Writes to the store, `written` or `failed`",
    ),
    metric("coreward_reloads_total", Counter, &["result"], &[Controller], "Reloads by SIGHUP, `in-force` or `refused`"),
    metric(
        "coreward_fleet_file_refused",
        Gauge,
        &[],
        &[Controller],
        "1: the fleet's file was wrong at its last reading; an older document is in force",
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
        "Parts of the newest updates that a load balancer (lb) or server (agent) rejects",
    ),
    metric(
        "coreward_reports_ahead_total",
        Counter,
        &[],
        &[Controller],
        "Reports sent more than a second ahead of the controller's wall clock",
    ),
    metric("coreward_api_requests_total", Counter, &["status"], &[Controller], "Requests to the HTTP API, by status"),
    metric(
        "coreward_controller_is_leader",
        Gauge,
        &[],
        &[Controller],
        "1: this controller leads; 0: another one does, or none",
    ),
    metric("coreward_leader_term", Gauge, &[], &[Controller], "Term of this leader, with etcd"),
    metric("coreward_leader_lease_seconds", Gauge, &[], &[Controller], "Remaining lease of this leader, with etcd"),
    metric("coreward_etcd_request_seconds", Histogram, &[], &[Controller], "Duration of requests to etcd"),
    metric(
        "coreward_table_propagation_seconds",
        Histogram,
        &[],
        &[Controller],
        "Time from the receipt of a report that makes a table due to a load balancer's acknowledgement of the table",
    ),
    metric(
        "coreward_report_sent_to_kernel_seconds",
        Histogram,
        &[],
        &[Controller],
        "The same from the agent's send time, by two machines' wall clocks",
    ),
    metric("coreward_servers", Gauge, &["state"], &[Controller], "Servers, by state"),
    metric("coreward_service_servers", Gauge, &["service", "state"], &[Controller], "Servers of a service, by state"),
    metric(
        "coreward_service_failing_open",
        Gauge,
        &["service"],
        &[Controller],
        "1: all servers of the service are down and still get new connections",
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
        "Smoothed load of a core / its capacity",
    ),
    metric("coreward_server_open_connections", Gauge, &["server"], &[Controller], "TCP connections of its services"),
    metric(
        "coreward_server_service_connections",
        Gauge,
        &["server", "service"],
        &[Controller],
        "TCP connections of a service at a server, by its agent's last count; absent: unknown",
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
        "SYNs that arrived on the receive queue that RSS predicts (predicted), or on another (other)",
    ),
    metric(
        "coreward_server_packets_total",
        Counter,
        &["server", "outcome"],
        &[Controller, Agent],
        "Packets at a server's programs, by outcome",
    ),
    metric(
        "coreward_server_warnings",
        Gauge,
        &["server"],
        &[Controller, Agent],
        "Faults that the agent reports, as in `coreward status`",
    ),
    metric("coreward_load_balancers", Gauge, &["state"], &[Controller], "Load balancers, alive or lost"),
    metric("coreward_cookie_key_age_seconds", MaxGauge, &[], &[Controller], "Age of the stamping cookie key"),
    metric(
        "coreward_lb_packets_total",
        Counter,
        &["load_balancer", "decision"],
        &[Controller, Lb],
        "Packets forwarded or passed on, by decision",
    ),
    metric(
        "coreward_lb_drops_total",
        Counter,
        &["load_balancer", "reason"],
        &[Controller, Lb],
        "Dropped packets, by reason",
    ),
    metric(
        "coreward_lb_events_total",
        Counter,
        &["load_balancer", "event"],
        &[Controller, Lb],
        "Other events of packets",
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
        "Servers without a known MAC address",
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
        "Servers that this load balancer masks because its own checks find them down",
    ),
    metric(
        "coreward_lb_expired_tables",
        Gauge,
        &[],
        &[Lb],
        "Services with an expired placement table: this load balancer places by its own counts",
    ),
    metric("coreward_lb_announced_vips", Gauge, &[], &[Lb], "VIPs announced to the routers, with [announce]"),
    metric(
        "coreward_lb_service_packets_total",
        Counter,
        &["service", "decision"],
        &[Lb],
        "Packets of a service forwarded or passed on, by decision",
    ),
    metric(
        "coreward_lb_service_drops_total",
        Counter,
        &["service", "reason"],
        &[Lb],
        "Dropped packets of a service, by reason",
    ),
    metric(
        "coreward_lb_service_forwarded_bytes_total",
        Counter,
        &["service"],
        &[Lb],
        "Bytes of a service's forwarded frames",
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
        "Time from the arrival of a table to the table in force",
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
        "Servers of a service that this load balancer finds up or down, or has no verdict on",
    ),
    metric(
        "coreward_health_check_duration_max_seconds",
        MaxGauge,
        &["service"],
        &[Lb],
        "Duration of the slowest server's newest health check",
    ),
    metric("coreward_agent_reports_total", Counter, &[], &[Agent], "Reports made by this process"),
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
        "Requests without a response",
    ),
    metric(
        "coreward_dispatch_queued_datagrams",
        Gauge,
        &["server", "service", "worker"],
        DISPATCHING,
        "Datagrams in a worker's socket queue at the last poll",
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
        "Requests of a service that wait for a core",
    ),
    metric(
        "coreward_orchestrate_outstanding_requests",
        Gauge,
        &["service"],
        &[Orchestrate],
        "Requests of a service at cores",
    ),
    metric(
        "coreward_orchestrate_intake",
        Gauge,
        &["mode"],
        &[Orchestrate],
        "1 for the way by which requests enter: socket, socket-fallback, af-xdp or af-xdp-zero-copy",
    ),
    metric(
        "coreward_orchestrate_intake_datagrams_total",
        Counter,
        &["outcome"],
        &[Orchestrate],
        "Datagrams to services at the interface of AF_XDP, by outcome",
    ),
    metric("coreward_orchestrate_workers", Gauge, &[], &[Orchestrate], "Workers that are attached"),
    metric(
        "coreward_orchestrate_events_total",
        Counter,
        &["event"],
        &[Orchestrate],
        "Events of workers, messages and datagrams, by kind",
    ),
    metric("coreward_rack_controller_connected", Gauge, &[], &[Rack], "1: the rack is connected to a controller"),
    metric("coreward_rack_agents", Gauge, &[], &[Rack], "Agents that are connected"),
];
