//! Simulation of one combination of policies and one seed.

use coreward_model::fleet::{SimulatedCluster, SimulatedFleetShape};
use coreward_model::policy::{self, PlacementPolicy as Placement};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::statistics::{mean, variance_pct};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::traffic::{ConnectionId, SimulatedTraffic, TrafficEvent};
use super::{PathSeedResult, PathSimulationConfig, PathSimulationError, ReportPhase};
use crate::rpc::outcome::{LatencyRecorder, ResponseObserver as _};
use crate::rpc::server::{
    QueueingServer, ResponseSink, ServerSpec, ServerVisitor, SimulatedRequest, SimulatedResponse,
};
use crate::rpc::ticks::{NEVER, Tick, time_units_to_ticks};
use crate::rpc::{CoreSelectionPolicy, ServiceTimeSampler};
use crate::unknown_name::UnknownName;

/// First of four random streams of [`seeded_rng`]: for servers, service times, hashes, and the times at which agents
/// read loads.
const RNG_STREAM_SERVERS: u64 = 0x7061_7411;
const RNG_STREAM_SERVICES: u64 = 0x7061_7412;
const RNG_STREAM_HASHES: u64 = 0x7061_7413;
const RNG_STREAM_REPORT_PHASES: u64 = 0x7061_7414;

/// Simulation of clients' traffic, a load balancer and a fleet of servers.
pub struct PathSimulation<'a> {
    config: &'a PathSimulationConfig,
    dispatch_policy: &'a CoreSelectionPolicy,
    placement: Box<dyn Placement>,
    fleet: SimulatedCluster,
    servers: Vec<Box<dyn QueueingServer<ResponseTracker>>>,
    traffic: SimulatedTraffic,
    service_time_sampler: ServiceTimeSampler,
    service_rng: Xoshiro256PlusPlus,
    hash_rng: Xoshiro256PlusPlus,
    response_tracker: ResponseTracker,
    busy_time_readings: Vec<BusyTimeReading>,
    arrived_request_count: u64,
    window_results: MeasuredWindowResults,
}

/// Last reading of a server's core busy times by its agent, and the time of the next one.
#[derive(Debug, Clone)]
struct BusyTimeReading {
    next_read_at: Tick,
    last_read_at: Option<Tick>,
    core_busy_times: Vec<Tick>,
}

/// Recorder of the responses, which also tracks the open connections.
struct ResponseTracker {
    latency_recorder: LatencyRecorder,
    connections: Vec<SimulatedConnection>,
    /// Ids of closed connections, which new connections can reuse.
    free_connection_ids: Vec<ConnectionId>,
    /// Number of open connections on each server.
    open_connection_counts_by_server: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct SimulatedConnection {
    server_index: u16,
    flow_hash: u32,
    /// Number of requests that have arrived but are not answered yet.
    unanswered_request_count: u32,
    /// Whether the connection's last request has arrived.
    has_last_request_arrived: bool,
}

impl ResponseSink for ResponseTracker {
    fn handle_response(&mut self, response: &SimulatedResponse) {
        self.latency_recorder.handle_response(response);
        let id = ConnectionId(response.request.connection_number);
        let connection = &mut self.connections[id.0 as usize];
        connection.unanswered_request_count -= 1;
        if connection.has_last_request_arrived && connection.unanswered_request_count == 0 {
            self.open_connection_counts_by_server[usize::from(connection.server_index)] -= 1;
            self.free_connection_ids.push(id);
        }
    }
}

impl ResponseTracker {
    fn new(class_count: usize, server_count: u16) -> Self {
        Self {
            latency_recorder: LatencyRecorder::new(class_count, None),
            connections: Vec::new(),
            free_connection_ids: Vec::new(),
            open_connection_counts_by_server: vec![0; usize::from(server_count)],
        }
    }

    fn open_connection(&mut self, server_index: u16, flow_hash: u32) -> ConnectionId {
        self.open_connection_counts_by_server[usize::from(server_index)] += 1;
        let connection = SimulatedConnection {
            server_index,
            flow_hash,
            unanswered_request_count: 0,
            has_last_request_arrived: false,
        };
        let Some(id) = self.free_connection_ids.pop() else {
            self.connections.push(connection);
            return ConnectionId(self.connections.len() as u32 - 1);
        };
        self.connections[id.0 as usize] = connection;
        id
    }
}

/// Variances in all windows measured so far, and the cores' busy times at the start of the current window.
#[derive(Debug)]
struct MeasuredWindowResults {
    window_start_busy_times: Vec<Tick>,
    server_variance_pct: Vec<f64>,
    core_variance_pct: Vec<f64>,
}

impl MeasuredWindowResults {
    fn new(core_count: usize) -> Self {
        Self {
            window_start_busy_times: vec![0; core_count],
            server_variance_pct: Vec::new(),
            core_variance_pct: Vec::new(),
        }
    }
}

/// Visitor that puts a server into a `Box<dyn ...>`, so that servers of different types fit into one list.
struct ServerBoxingVisitor;

impl<S: ResponseSink> ServerVisitor<S> for ServerBoxingVisitor {
    type Output = Box<dyn QueueingServer<S>>;

    fn visit_server(self, server: impl QueueingServer<S> + 'static) -> Box<dyn QueueingServer<S>> {
        Box::new(server)
    }
}

fn build_random_fleet(config: &PathSimulationConfig, seed: u64) -> SimulatedCluster {
    let shape = SimulatedFleetShape {
        server_count: config.server_count,
        cores_per_server: config.cores_per_server,
        bucket_count: config.bucket_count,
        load_ewma_alpha: config.smoothing_weight,
        indirection_table_draw_method: config.indirection_table_fill_rule,
    };
    let plan = shape.draw_plan(&mut seeded_rng(seed, RNG_STREAM_SERVERS));
    let mut fleet = SimulatedCluster::new(plan).expect("as many entries as buckets");
    if config.requests_per_connection == 1.0 {
        fleet.enable_counting_placements_as_requests();
    }
    fleet
}

/// Returns the initial reading of each server, with busy times of 0 and the time of its agent's first reading.
fn initial_busy_time_readings(config: &PathSimulationConfig, seed: u64) -> Vec<BusyTimeReading> {
    let mut rng = seeded_rng(seed, RNG_STREAM_REPORT_PHASES);
    let report_interval = config.seconds_to_ticks(config.report_interval_ms / 1e3);
    let build_initial_reading = |_| {
        let next_read_at = match config.report_phase {
            ReportPhase::Aligned => 0,
            ReportPhase::Random => report_interval * Tick::from(uniform_below(&mut rng, 1000)) / 1000,
        };
        BusyTimeReading {
            next_read_at,
            last_read_at: None,
            core_busy_times: vec![0; usize::from(config.cores_per_server)],
        }
    };
    (0..config.server_count).map(build_initial_reading).collect()
}

impl<'a> PathSimulation<'a> {
    /// Creates a simulation in which the load balancer uses `policy` and the servers use `dispatch_policy`.
    pub fn new(
        config: &'a PathSimulationConfig,
        policy: &str,
        dispatch_policy: &'a CoreSelectionPolicy,
        seed: u64,
    ) -> Result<Self, PathSimulationError> {
        let fleet = build_random_fleet(config, seed);
        let unknown_policy_error = |_| UnknownName::new("policy", policy, policy::policy_names());
        let class_count = config.service_times.class_service_times().len();
        let build_server = |position| {
            let spec = ServerSpec {
                policy: dispatch_policy,
                core_count: config.cores_per_server,
                class_count: class_count as u8,
                interface_latency: time_units_to_ticks(config.interface_latency),
                indirection_table: fleet.indirection_table(position),
            };
            spec.build_and_visit(ServerBoxingVisitor)
        };
        Ok(Self {
            placement: policy::create_policy_by_name(policy, seed).map_err(unknown_policy_error)?,
            servers: (0..usize::from(config.server_count)).map(build_server).collect(),
            traffic: SimulatedTraffic::new(config, seed),
            service_time_sampler: config.service_times.build_sampler(),
            service_rng: seeded_rng(seed, RNG_STREAM_SERVICES),
            hash_rng: seeded_rng(seed, RNG_STREAM_HASHES),
            response_tracker: ResponseTracker::new(class_count, config.server_count),
            busy_time_readings: initial_busy_time_readings(config, seed),
            arrived_request_count: 0,
            window_results: MeasuredWindowResults::new(fleet.core_count()),
            config,
            dispatch_policy,
            fleet,
        })
    }

    pub fn run(mut self) -> PathSeedResult {
        let seconds_to_ticks = |seconds: f64| self.config.seconds_to_ticks(seconds);
        let [end_time, warm_up] =
            [self.config.connection_arrival_seconds, self.config.warm_up_seconds()].map(seconds_to_ticks);
        let [report_ticks, window_ticks] =
            [self.config.report_interval_ms / 1e3, self.config.window_ms / 1e3].map(seconds_to_ticks);
        let report_interval = report_ticks.max(1);
        let (mut next_report, mut next_window, mut is_measuring) = (0, warm_up, false);
        let mut server_to_read = self.next_server_to_read();
        loop {
            let now = self
                .traffic
                .next_event_time()
                .min(next_report)
                .min(next_window)
                .min(self.busy_time_readings[server_to_read].next_read_at);
            if now > end_time {
                break;
            }
            if now == next_window {
                self.close_window(now, is_measuring);
                if !is_measuring {
                    self.response_tracker.latency_recorder.begin_measurement_at(now);
                    is_measuring = true;
                }
                next_window += window_ticks.max(1);
            } else if now == self.busy_time_readings[server_to_read].next_read_at {
                self.read_core_busy_times(server_to_read, now);
                self.busy_time_readings[server_to_read].next_read_at += report_interval;
                server_to_read = self.next_server_to_read();
            } else if now == next_report {
                self.rebuild_table(now);
                next_report += report_interval;
            } else {
                self.handle_traffic_event(now);
            }
        }
        self.into_result()
    }

    /// Runs the servers until they have answered all requests, and returns the results.
    fn into_result(mut self) -> PathSeedResult {
        for server in &mut self.servers {
            server.advance(NEVER - 1, &mut self.response_tracker);
        }
        PathSeedResult {
            latency: self.response_tracker.latency_recorder.overall_latency().expect("requests come after the warm-up"),
            server_variance_pct: mean(&self.window_results.server_variance_pct).unwrap_or(0.0),
            core_variance_pct: mean(&self.window_results.core_variance_pct).unwrap_or(0.0),
            request_count: self.arrived_request_count,
        }
    }

    fn handle_traffic_event(&mut self, now: Tick) {
        let id = match self.traffic.pop_event() {
            TrafficEvent::NextRequest(id) => id,
            TrafficEvent::ConnectionOpened(tuple) => {
                let server_index = self.fleet.place_connection(&tuple) / usize::from(self.config.cores_per_server);
                // This also closes the connections that have ended by now.
                self.servers[server_index].advance(now, &mut self.response_tracker);
                let id = self.response_tracker.open_connection(server_index as u16, self.fleet.rss_hash(&tuple));
                self.traffic.open_connection(id);
                id
            }
        };
        let (class, work) = self.service_time_sampler.sample_class_and_time(&mut self.service_rng);
        let connection = &mut self.response_tracker.connections[id.0 as usize];
        connection.unanswered_request_count += 1;
        connection.has_last_request_arrived = !self.traffic.has_more_requests(id);
        let server = &mut self.servers[usize::from(connection.server_index)];
        let request = SimulatedRequest {
            arrived_at: now,
            service_time: work,
            request_hash: self.hash_rng.next_u32(),
            flow_hash: connection.flow_hash,
            connection_number: id.0,
            class_index: class,
            service: self.dispatch_policy.class_priorities().service_of_class(class),
        };
        server.advance(now, &mut self.response_tracker);
        server.add_request(request);
        self.arrived_request_count += 1;
    }

    /// Returns each core's busy time from the start of the simulation until now (ticks).
    fn core_busy_times(&mut self, now: Tick) -> Vec<Tick> {
        let mut busy_times = Vec::with_capacity(self.window_results.window_start_busy_times.len());
        for server in &mut self.servers {
            server.advance(now, &mut self.response_tracker);
            busy_times.extend(server.core_busy_times(now));
        }
        busy_times
    }

    /// Returns the index of the server whose agent is the next to read the busy times of its cores.
    fn next_server_to_read(&self) -> usize {
        let next_reading = self.busy_time_readings.iter().enumerate().min_by_key(|(_, reading)| reading.next_read_at);
        next_reading.expect("at least one server").0
    }

    /// Reads the busy times of a server's cores, as its agent does. If connections have one request each and the policy
    /// inside servers does not follow RSS, stores the mean as each core's busy time.
    fn read_core_busy_times(&mut self, server_index: usize, now: Tick) {
        let server = &mut self.servers[server_index];
        server.advance(now, &mut self.response_tracker);
        let mut busy_times: Vec<Tick> = server.core_busy_times(now).to_vec();
        if self.config.requests_per_connection == 1.0 && !self.dispatch_policy.selects_core_by_rss() {
            let mean_busy_time = busy_times.iter().sum::<Tick>() / busy_times.len() as Tick;
            busy_times.fill(mean_busy_time);
        }
        let reading = &mut self.busy_time_readings[server_index];
        (reading.last_read_at, reading.core_busy_times) = (Some(now), busy_times);
    }

    /// Computes a placement table from the agents' latest readings.
    fn rebuild_table(&mut self, now: Tick) {
        for server in &mut self.servers {
            server.advance(now, &mut self.response_tracker);
        }
        let ns_per_unit = self.config.unit_us * 1e3;
        let ticks_to_ns = |time: Tick| (crate::rpc::ticks::ticks_to_time_units(time) * ns_per_unit) as u64;
        let busy_ns: Vec<u64> = self
            .busy_time_readings
            .iter()
            .flat_map(|reading| &reading.core_busy_times)
            .map(|busy_time| ticks_to_ns(*busy_time))
            .collect();
        let last_read_ns: Vec<Option<u64>> =
            self.busy_time_readings.iter().map(|reading| reading.last_read_at.map(ticks_to_ns)).collect();
        self.fleet.install_table_from_timed_reports(
            &last_read_ns,
            &busy_ns,
            &self.response_tracker.open_connection_counts_by_server,
            self.placement.as_mut(),
        );
    }

    fn close_window(&mut self, now: Tick, is_measured: bool) {
        let busy_times = self.core_busy_times(now);
        let busy_time_increase =
            |(busy_time, previous_busy_time): (&Tick, &Tick)| (busy_time - previous_busy_time) as f64;
        let core_busy_times: Vec<f64> =
            busy_times.iter().zip(&self.window_results.window_start_busy_times).map(busy_time_increase).collect();
        self.window_results.window_start_busy_times = busy_times;
        if is_measured {
            let server_busy_times: Vec<f64> = core_busy_times
                .chunks(usize::from(self.config.cores_per_server))
                .map(|cores| cores.iter().sum())
                .collect();
            self.window_results.server_variance_pct.extend(variance_pct(&server_busy_times));
            self.window_results.core_variance_pct.extend(variance_pct(&core_busy_times));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_the_predicted_core_under_rss() {
        let config = PathSimulationConfig {
            requests_per_connection: 3.0,
            connection_arrival_seconds: 1.0,
            ..PathSimulationConfig::default()
        };
        let create_simulation = || PathSimulation::new(&config, "hash", &CoreSelectionPolicy::Rss, 7).unwrap();
        let (mut simulation, mut reference) = (create_simulation(), create_simulation());
        let end_time = simulation.traffic.next_event_time() + 300 * time_units_to_ticks(1.0);
        let mut expected_busy_times = vec![0; simulation.fleet.core_count()];
        let mut predicted_cores = Vec::new();
        for simulation in [&mut simulation, &mut reference] {
            simulation.read_core_busy_times(0, 0);
            simulation.rebuild_table(0);
        }
        while simulation.traffic.next_event_time() < end_time {
            let now = simulation.traffic.next_event_time();
            simulation.handle_traffic_event(now);
            let id = match reference.traffic.pop_event() {
                TrafficEvent::NextRequest(id) => id,
                TrafficEvent::ConnectionOpened(tuple) => {
                    // The reference simulation never reuses ids.
                    let id = ConnectionId(predicted_cores.len() as u32);
                    predicted_cores.push(reference.fleet.place_connection(&tuple));
                    reference.traffic.open_connection(id);
                    id
                }
            };
            expected_busy_times[predicted_cores[id.0 as usize]] +=
                reference.service_time_sampler.sample_class_and_time(&mut reference.service_rng).1;
        }
        assert!(predicted_cores.len() > 500);
        assert_eq!(simulation.core_busy_times(NEVER - 1), expected_busy_times);
        assert!(
            simulation.response_tracker.open_connection_counts_by_server.iter().sum::<u32>() > 0,
            "some connections are to have more requests"
        );
    }
}
