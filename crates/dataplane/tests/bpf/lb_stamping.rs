//! Tests of `timestamps = "lb"` with the kernels' TCP. Servers have no coreward program, and their replies pass the
//! load balancer.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::{
    LoadBalancer, LoadBalancerOptions, Server, ServerClockMeasurements, ServerClockState, ServiceIndex, XdpMode,
};
use coreward_intf as intf;
use coreward_model::consistency::{CookieStamper, ServiceSettings};
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;

use crate::support::balancer::{random_placement_table, server_id_from_number, service_address};
use crate::support::network::{NetworkSegment, PinDirectory, VIP, interface_mac, pin_thread_to_one_cpu};
use crate::support::{missing_bpf_rights, skip_if};

const SERVICE_PORT: u16 = 80;
const SOCKET_TIMEOUT: Duration = Duration::from_secs(30);
const SERVER_COUNT: u8 = 3;

fn fleet_keys(current: CookieKeyIndex) -> FleetCookieKeys {
    FleetCookieKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current_key_index: current }
}

struct StampingTestEnv {
    lb: LoadBalancer,
    service: ServiceIndex,
    listeners: Vec<TcpListener>,
    segment: NetworkSegment,
    _pins: PinDirectory,
}

impl StampingTestEnv {
    fn new() -> Self {
        let (segment, pins) = (NetworkSegment::new(SERVER_COUNT), PinDirectory::new());
        let options = LoadBalancerOptions { pin_directory: Some(pins.path()), ..LoadBalancerOptions::default() };
        let mut lb = LoadBalancer::load(options).unwrap();
        segment.load_balancer.run_in_namespace(|| lb.attach("eth0", XdpMode::Generic)).unwrap();
        let lb_stamping_mode =
            ServiceSettings { timestamps: CookieStamper::LoadBalancer, ..ServiceSettings::default() };
        let service_index = lb.set_services(&[(service_address((VIP, SERVICE_PORT)), lb_stamping_mode)]).unwrap()[0];
        lb.set_cookie_keys(&fleet_keys(CookieKeyIndex::First));
        lb.set_time_key(service_index, CookieKey { k0: 77, k1: 88 });
        let server_ids: Vec<_> = (0..SERVER_COUNT).map(|number| server_id_from_number(u64::from(number) + 5)).collect();
        for (server, host) in server_ids.iter().zip(&segment.servers) {
            let server_mac = host.run_in_namespace(|| interface_mac("eth0"));
            lb.set_server(service_index, *server, Server { mac: Some(server_mac), is_eligible: true });
        }
        // Round robin gives every server the same number of connections.
        lb.install_table(
            service_index,
            &random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, &mut seeded_rng(3, 0)),
        )
        .unwrap();
        let bind_listener = || TcpListener::bind((VIP, SERVICE_PORT)).unwrap();
        let listeners = segment.servers.iter().map(|host| host.run_in_namespace(bind_listener)).collect();
        Self { lb, service: service_index, listeners, segment, _pins: pins }
    }

    fn connect_to_service(&self) -> TcpStream {
        let service_address = SocketAddr::from((VIP, SERVICE_PORT));
        let stream = self
            .segment
            .client
            .run_in_namespace(|| TcpStream::connect_timeout(&service_address, SOCKET_TIMEOUT))
            .unwrap();
        stream.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
        stream
    }

    /// Opens a connection. Returns the client's socket, the server's socket, and the server's index in `listeners`.
    fn open_connection(&self) -> (TcpStream, TcpStream, usize) {
        let client = self.connect_to_service();
        let deadline = Instant::now() + SOCKET_TIMEOUT;
        loop {
            for (number, listener) in self.listeners.iter().enumerate() {
                listener.set_nonblocking(true).unwrap();
                if let Ok((server, _)) = listener.accept() {
                    server.set_nonblocking(false).unwrap();
                    server.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
                    return (client, server, number);
                }
            }
            assert!(Instant::now() < deadline, "no server accepted the connection");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn service_counter(&self, counter: intf::lb_counter) -> u64 {
        self.lb.service_counters(self.service).packets_by_outcome[counter as usize]
    }

    fn server_clock_measurements(&self) -> Vec<ServerClockMeasurements> {
        self.lb.server_clock_measurements(self.service).unwrap().into_iter().map(|(_, clock)| clock).collect()
    }
}

fn exchange_and_check_data(client: &mut TcpStream, server: &mut TcpStream) {
    let sent_bytes: Vec<u8> = (0..200_000u32).map(|n| ((n * 7) >> 3) as u8).collect();
    let send_and_check = |sender: &mut TcpStream, receiver: &mut TcpStream| {
        let mut received_bytes = vec![0; sent_bytes.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| sender.write_all(&sent_bytes).unwrap());
            receiver.read_exact(&mut received_bytes).unwrap();
        });
        assert_eq!(sent_bytes, received_bytes);
    };
    send_and_check(client, server);
    send_and_check(server, client);
}

#[test]
fn connections_continue_with_shared_timestamp_clock() {
    skip_if!(missing_bpf_rights());
    pin_thread_to_one_cpu();
    let env = StampingTestEnv::new();
    // Until the servers' clocks are known, connections are not stamped but have flow table entries.
    let mut unstamped_connections: Vec<_> = (0..SERVER_COUNT).map(|_| env.open_connection()).collect();
    for (client, server, _) in &mut unstamped_connections {
        exchange_and_check_data(client, server);
    }
    assert_eq!(env.service_counter(intf::LB_COUNTER_REPLY_STAMPED), 0);
    while env.server_clock_measurements().iter().any(|clock| clock.state() != ServerClockState::SharedClock) {
        unstamped_connections.push(env.open_connection());
        assert!(unstamped_connections.len() < 400, "{:?}", env.server_clock_measurements());
    }
    let mut stamped_connections: Vec<_> = (0..2 * SERVER_COUNT).map(|_| env.open_connection()).collect();
    let packets_found_by_cookie = env.service_counter(intf::LB_COUNTER_ESTABLISHED);
    for (client, server, _) in stamped_connections.iter_mut().chain(&mut unstamped_connections) {
        exchange_and_check_data(client, server);
    }
    assert!(env.service_counter(intf::LB_COUNTER_REPLY_STAMPED) > 100);
    assert!(env.service_counter(intf::LB_COUNTER_ESTABLISHED) > packets_found_by_cookie + 100);

    expect_connections_survive_key_changes(env, stamped_connections.into_iter().chain(unstamped_connections).collect());
}

#[test]
fn connections_continue_with_timestamp_clock_per_connection() {
    skip_if!(missing_bpf_rights());
    pin_thread_to_one_cpu();
    let env = StampingTestEnv::new();
    for host in &env.segment.servers {
        host.set_sysctl("ipv4/tcp_timestamps", "1");
    }
    // Open connections reveal the rate of the servers' clocks.
    let mut unstamped_connections: Vec<_> = (0..2 * SERVER_COUNT).map(|_| env.open_connection()).collect();
    let deadline = Instant::now() + SOCKET_TIMEOUT;
    while env.server_clock_measurements().iter().any(|clock| clock.state() != ServerClockState::PerConnectionClock) {
        unstamped_connections.iter_mut().for_each(|(client, server, _)| exchange_and_check_data(client, server));
        assert!(Instant::now() < deadline, "{:?}", env.server_clock_measurements());
    }
    assert_eq!(env.service_counter(intf::LB_COUNTER_REPLY_STAMPED), 0);
    let mut stamped_connections: Vec<_> = (0..4 * SERVER_COUNT).map(|_| env.open_connection()).collect();
    let packets_found_in_flow_table = env.service_counter(intf::LB_COUNTER_FLOW_TABLE);
    for (client, server, _) in &mut stamped_connections {
        exchange_and_check_data(client, server);
    }
    // Each unstamped connection may still send one delayed acknowledgement.
    assert!(
        env.service_counter(intf::LB_COUNTER_FLOW_TABLE)
            <= packets_found_in_flow_table + unstamped_connections.len() as u64
    );
    assert!(
        env.service_counter(intf::LB_COUNTER_REPLY_STAMPED) > 100
            && env.service_counter(intf::LB_COUNTER_ESTABLISHED) > 100
    );
    for clock in env.server_clock_measurements() {
        assert!(clock.disagreeing_syn_ack_count > 0 && clock.stamping_problem().is_none(), "{clock:?}");
    }
    expect_connections_survive_key_changes(env, stamped_connections.into_iter().chain(unstamped_connections).collect());
}

/// Asserts that stamped and unstamped connections continue while cookie keys change and no server is eligible. Then
/// closes the connections.
fn expect_connections_survive_key_changes(
    mut env: StampingTestEnv,
    mut connections: Vec<(TcpStream, TcpStream, usize)>,
) {
    for current in [CookieKeyIndex::Second, CookieKeyIndex::First] {
        env.lb.set_cookie_keys(&fleet_keys(current));
        std::thread::sleep(Duration::from_millis(1100));
        for (client, server, _) in &mut connections {
            exchange_and_check_data(client, server);
        }
    }
    // Half of the connections are closed by the client first, the others by the server.
    for (number, (mut client, mut server, _)) in connections.into_iter().enumerate() {
        let (closing_stream, waiting_stream) =
            if number % 2 == 0 { (client, &mut server) } else { (server, &mut client) };
        drop(closing_stream);
        assert_eq!(waiting_stream.read(&mut [0]).unwrap(), 0);
    }
    for host in env.segment.servers.iter().chain([&env.segment.client]) {
        for counter in ["TcpExtPAWSEstab", "TcpExtPAWSActive", "TcpExtTSEcrRejected", "TcpInErrs", "TcpInCsumErrors"] {
            assert_eq!(host.kernel_counter(counter), 0, "{counter}");
        }
    }
}
