//! Tests of `bpf/server/server.bpf.c` between the TCP stacks of two kernels: every packet of a connection carries the
//! cookie, and neither kernel counts an error.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::{self, Direction};
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{Cookie, FleetKeys, KeyIndex};
use socket2::SockRef;

use crate::support::network::VethPair;
use crate::support::server_env::{
    Sniffer, TIMEOUT, TestEnv, attach, client, cookie_of, flags, id, keys, pattern, send_and_receive, set_services, vip,
};
use crate::support::{
    self, ACK, FIN, Family, RST, SYN, Tcp, missing_bpf_rights, now_ms, skip_if, timestamp_offset, word,
};

/// Opens connections, transfers data both ways in large segments, and closes half of them by the server first.
fn exchange(env: &TestEnv, listener: &TcpListener) {
    let sniffer = Sniffer::new(env);
    for round in 0..4 {
        let (mut client, mut server) = env.connection(listener);
        send_and_receive(&mut client, &mut server, &pattern(3 << 20));
        send_and_receive(&mut server, &mut client, &pattern(3 << 20));
        if round % 2 == 0 {
            drop(server);
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
        } else {
            drop(client);
            assert_eq!(server.read(&mut [0]).unwrap(), 0);
        }
    }
    let frames = sniffer.received_from_vip();
    for expected in [SYN | ACK, ACK, FIN | ACK] {
        assert!(frames.iter().any(|frame| flags(frame) == expected), "no packet with flags {expected:#x}");
    }
    for frame in &frames {
        assert_eq!(cookie_of(frame), Cookie::Server(id()), "{frame:02x?}");
    }
    assert!(env.counter(intf::SERVER_COUNTER_STAMPED) >= frames.len() as u64);
    assert!(env.counter(intf::SERVER_COUNTER_RESTORED) > 100);
    assert_eq!(env.counter(intf::SERVER_COUNTER_INGRESS_OTHER_COOKIE), 0);
    assert_eq!(env.counter(intf::SERVER_COUNTER_TSVAL_CLAMPED), 0);
    env.assert_no_errors();
}

#[test]
fn connections_carry_the_cookie_from_first_to_last_packet() {
    skip_if!(missing_bpf_rights());
    for family in Family::BOTH {
        let env = TestEnv::of(family, ServiceMode::default());
        exchange(&env, &env.listen());
    }
}

#[test]
fn syn_cookies_work() {
    skip_if!(missing_bpf_rights());
    for family in Family::BOTH {
        let env = TestEnv::of(family, ServiceMode::default());
        env.pair.server.set_sysctl("ipv4/tcp_syncookies", "2");
        exchange(&env, &env.listen());
        assert_eq!(env.pair.server.kernel_counter("TcpExtSyncookiesRecv"), 4, "{family:?}");
        assert_eq!(env.pair.server.kernel_counter("TcpExtSyncookiesFailed"), 0, "{family:?}");
    }
}

#[test]
fn clsact_replaces_tcx_below_kernel_6_6() {
    skip_if!(missing_bpf_rights());
    let mut env = TestEnv::new();
    let interface = env.pair.server_interface();
    let mut programs = ServerPrograms::load_only(false).unwrap();
    std::mem::swap(&mut programs, &mut env.programs);
    env.pair.server.run_inside(|| programs.remove()).unwrap();
    env.programs.set_keys(&keys(), now_ms().wrapping_sub(1000));
    set_services(&mut env.programs, ServiceMode::default());
    for direction in [Direction::Ingress, Direction::Egress] {
        // The second attachment replaces the first.
        for _ in 0..2 {
            let attach = || tc::attach_to_clsact(env.programs.program(direction), interface, direction);
            env.pair.server.run_inside(attach).unwrap();
        }
    }
    let listener = env.listen();
    exchange(&env, &listener);
    let stamped = env.counter(intf::SERVER_COUNTER_STAMPED);
    for direction in [Direction::Ingress, Direction::Egress] {
        let detach = || tc::detach(interface, direction, &env.pins.path().join("none"));
        env.pair.server.run_inside(detach).unwrap();
    }
    drop(env.connection(&listener));
    assert_eq!(env.counter(intf::SERVER_COUNTER_STAMPED), stamped, "detached");
}

#[test]
fn answers_without_a_socket_and_resets_are_stamped() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_stamped_answers_without_socket);
}

fn expect_stamped_answers_without_socket(family: Family) {
    let env = TestEnv::of(family, ServiceMode::default());
    let listener = env.listen();
    let sniffer = Sniffer::new(&env);

    // The server resets the connection, because it closes the socket with unread data.
    let (mut client, server) = env.connection(&listener);
    client.write_all(b"unread").unwrap();
    server.peek(&mut [0]).unwrap();
    SockRef::from(&server).set_linger(Some(Duration::ZERO)).unwrap();
    drop(server);
    assert!(client.read(&mut [0]).is_err(), "reset");
    let resets: Vec<_> = sniffer.received_from_vip().into_iter().filter(|frame| flags(frame) & RST != 0).collect();
    assert_eq!(resets.len(), 1);
    assert_eq!(cookie_of(&resets[0]), Cookie::Server(id()));

    // In TIME-WAIT the server acknowledges a repeated segment without a full socket.
    let (mut client, server) = env.connection(&listener);
    drop(server);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    let port = client.local_addr().unwrap().port();
    drop(client);
    let (mut frames, end) = (sniffer.collect_from_vip(&env), Instant::now() + TIMEOUT);
    // Returns whether the server has sent its FIN, and has acknowledged the client's FIN.
    let both_ended = |frames: &[Vec<u8>]| {
        let after_end = frames.iter().skip_while(|frame| flags(frame) != FIN | ACK);
        after_end.last().is_some_and(|last| flags(last) == ACK)
    };
    while !both_ended(&frames) {
        assert!(Instant::now() < end, "{frames:02x?}");
        frames.extend(sniffer.collect_from_vip(&env));
    }
    let last = frames.pop().unwrap();
    let tcp = support::tcp_offset(&last);
    // The client's FIN is repeated, composed from the server's last acknowledgement.
    let mut again = Tcp::between(self::client(family, port), vip(family));
    again.flags = FIN | ACK;
    again.payload.clear();
    again.destination_mac = last[6..12].try_into().unwrap();
    let tsecr = word(&last, timestamp_offset(&last).unwrap());
    again.options = support::aligned_timestamp(word(&last, timestamp_offset(&last).unwrap() + 4), tsecr);
    let sequence = word(&last, tcp + 8).wrapping_sub(1);
    let frame = again.frame_with_sequence(sequence, word(&last, tcp + 4));
    sniffer.send(&env, &frame);
    let answers = sniffer.collect_from_vip(&env);
    assert_eq!(answers.len(), 1, "TIME-WAIT answers");
    assert_eq!((flags(&answers[0]), cookie_of(&answers[0])), (ACK, Cookie::Server(id())));
    assert_eq!(env.counter(intf::SERVER_COUNTER_EGRESS_OTHER_CLOCK), 0);
}

#[test]
fn connections_older_than_the_clock_stay_unchanged() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_older_connections_unchanged);
}

fn expect_older_connections_unchanged(family: Family) {
    let env = TestEnv::of(family, ServiceMode::default());
    env.pair.server.set_sysctl("ipv4/tcp_timestamps", "1");
    let listener = env.listen();
    let (mut client, mut server) = env.connection(&listener);
    env.pair.server.set_sysctl("ipv4/tcp_timestamps", "2");
    send_and_receive(&mut client, &mut server, &pattern(100_000));
    send_and_receive(&mut server, &mut client, &pattern(100_000));
    assert_eq!(env.counter(intf::SERVER_COUNTER_STAMPED), 0);
    assert_eq!(env.counter(intf::SERVER_COUNTER_RESTORED), 0);
    assert!(env.counter(intf::SERVER_COUNTER_EGRESS_OTHER_CLOCK) > 0);
    env.assert_no_errors();
}

#[test]
fn broadcast_reaches_only_the_connection() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_broadcast_at_connection);
}

fn expect_broadcast_at_connection(family: Family) {
    let env = TestEnv::of(family, ServiceMode::default());
    let listener = env.listen();
    let sniffer = Sniffer::new(&env);
    let (client, mut server) = env.connection(&listener);
    let handshake = sniffer.received_from_vip();
    let tcp = support::tcp_offset(&handshake[0]);
    let mut reset = Tcp::between(client.local_addr().unwrap(), vip(family));
    reset.destination_mac = [0xff; 6];
    reset.flags = RST;
    reset.payload.clear();
    let sequence = word(&handshake[0], tcp + 8);

    // An ACK from another port finds only the listening socket, which does not count.
    let mut other = reset.clone();
    other.source.set_port(1);
    other.flags = ACK;
    sniffer.send(&env, &other.frame_with_sequence(sequence, 1));
    let answers = sniffer.collect_from_vip(&env);
    assert_eq!(env.counter(intf::SERVER_COUNTER_BROADCAST_IGNORED), 1);
    assert_eq!(answers.len(), 0, "the server kept silent");

    sniffer.send(&env, &reset.frame_with_sequence(sequence, 0));
    assert_eq!(server.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(env.counter(intf::SERVER_COUNTER_BROADCAST_ACCEPTED), 1);
}

#[test]
fn new_process_takes_over() {
    skip_if!(missing_bpf_rights());
    let mut env = TestEnv::new();
    let listener = env.listen();
    let (mut client, mut server) = env.connection(&listener);
    for round in 1..=3 {
        let stamped = env.counter(intf::SERVER_COUNTER_STAMPED);
        env.programs = attach(&env.pair, &env.pins);
        assert!(env.programs.is_taken_over() && env.programs.has_services());
        // Keys and services were taken over.
        send_and_receive(&mut client, &mut server, &pattern(round * 100_000));
        send_and_receive(&mut server, &mut client, &pattern(round * 100_000));
        assert!(env.counter(intf::SERVER_COUNTER_STAMPED) > stamped, "counters go on, and count");
    }
    env.assert_no_errors();

    // The device is replaced by another: the pinned links of the former device are replaced, too.
    env.pair.server.ip("link del eth0");
    let pair = VethPair::new();
    env.programs = attach(&pair, &env.pins);
    env.pair = pair;
    drop(listener);
    let listener = env.listen();
    let stamped = env.counter(intf::SERVER_COUNTER_STAMPED);
    drop(env.connection(&listener));
    assert!(env.counter(intf::SERVER_COUNTER_STAMPED) > stamped);
}

const PACKETS_PER_KEY: usize = 500;
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Transfers data both ways while the fleet's current key changes 30 times.
#[test]
fn transfer_continues_when_keys_change() {
    skip_if!(missing_bpf_rights());
    let mut env = TestEnv::new();
    let sniffer = Sniffer::new(&env);
    let (mut client, mut server) = env.connection(&env.listen());
    let data = pattern(1 << 20);
    let key_bit = |frame: &Vec<u8>| word(frame, timestamp_offset(frame).unwrap()) & intf::COOKIE_KEY_BIT;
    let current_bit = |keys: &FleetKeys| if keys.current == KeyIndex::First { 0 } else { intf::COOKIE_KEY_BIT };
    let (over, mut frames, end) = (AtomicBool::new(false), vec![], Instant::now() + RUN_TIMEOUT);
    let rounds = std::thread::scope(|scope| {
        let transfers = scope.spawn(|| {
            let mut rounds = 0;
            while !over.load(Ordering::Relaxed) {
                send_and_receive(&mut client, &mut server, &data);
                send_and_receive(&mut server, &mut client, &data);
                rounds += 1;
            }
            rounds
        });
        let mut keys = keys();
        for _ in 0..30 {
            keys.current = keys.current.other();
            env.programs.set_keys(&keys, now_ms() + 20);
            let mut with_new_key = 0;
            while with_new_key < PACKETS_PER_KEY && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
                let new = sniffer.received_from_vip();
                with_new_key += new.iter().filter(|frame| key_bit(frame) == current_bit(&keys)).count();
                frames.extend(new);
            }
        }
        over.store(true, Ordering::Relaxed);
        transfers.join().unwrap()
    });
    let switches = frames.windows(2).filter(|pair| key_bit(&pair[0]) != key_bit(&pair[1])).count();
    assert!(switches >= 20, "{switches} switches in {} packets", frames.len());
    assert!(frames.iter().all(|frame| cookie_of(frame) == Cookie::Server(id())));
    assert_eq!(env.counter(intf::SERVER_COUNTER_INGRESS_OTHER_COOKIE), 0);
    env.assert_no_errors();
    for host in [&env.pair.client, &env.pair.server] {
        let (again, sent) = (host.kernel_counter("TcpRetransSegs"), host.kernel_counter("TcpOutSegs"));
        assert!(again * 200 < sent + 200, "{again} of {sent} segments sent again in {rounds} rounds");
    }
}

/// Side of the connection that sends first after the silence.
#[derive(Debug, Clone, Copy)]
enum FirstSender {
    Server,
    Client,
    /// The server sends first, and sends more than one segment.
    ServerManySegments,
}

/// Connection that is silent for `silent_time` before it is used again.
struct SilentConnection {
    client: TcpStream,
    server: TcpStream,
    silence: Duration,
    first: FirstSender,
    keep_alive: bool,
}

impl SilentConnection {
    fn new(env: &TestEnv, listener: &TcpListener, silence: Duration, first: FirstSender, keep_alive: bool) -> Self {
        let (mut client, mut server) = env.connection(listener);
        if keep_alive {
            let interval = Duration::from_secs(25);
            let probes = socket2::TcpKeepalive::new().with_time(interval).with_interval(interval);
            SockRef::from(&server).set_tcp_keepalive(&probes).unwrap();
        }
        send_and_receive(&mut client, &mut server, b"request");
        send_and_receive(&mut server, &mut client, b"answer");
        Self { client, server, silence, first, keep_alive }
    }

    /// Waits until the silence ends, and then transfers data. Returns a description if the transfer took 3 s or longer.
    fn resume(mut self) -> Option<String> {
        std::thread::sleep(self.silence);
        let (client, server, began) = (&mut self.client, &mut self.server, Instant::now());
        if matches!(self.first, FirstSender::Client) {
            send_and_receive(client, server, b"request");
        }
        for round in 1..20 {
            let length = if matches!(self.first, FirstSender::ServerManySegments) { 1 << 18 } else { round };
            send_and_receive(server, client, &pattern(length));
            send_and_receive(client, server, b"request");
        }
        let (took, Self { silence, first, keep_alive, .. }) = (began.elapsed(), self);
        let is_slow = took >= Duration::from_secs(3);
        is_slow.then(|| format!("{took:?} after {silence:?}, {first:?} first, keep-alive {keep_alive}"))
    }
}

/// Asserts that connections continue after each silence (in s), for each first sender, with and without keep-alive.
fn assert_resumes_after(env: &TestEnv, silences: &[u64], keep_alives: &[bool]) {
    let (listener, mut connections) = (env.listen(), vec![]);
    for silence in silences {
        for first in [FirstSender::Server, FirstSender::Client, FirstSender::ServerManySegments] {
            for keep_alive in keep_alives {
                let silence = Duration::from_secs(*silence);
                connections.push(SilentConnection::new(env, &listener, silence, first, *keep_alive));
            }
        }
    }
    let slow: Vec<String> = std::thread::scope(|scope| {
        let going_on: Vec<_> = connections.into_iter().map(|connection| scope.spawn(|| connection.resume())).collect();
        going_on.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    // If packets are lost, a sender repeats them four times within 3 s. On a busy machine a transfer is slow without
    // retransmissions.
    let again: u64 =
        [&env.pair.client, &env.pair.server].map(|host| host.kernel_counter("TcpRetransSegs")).iter().sum();
    assert!(slow.is_empty() || again < 4, "{again} segments sent again: {slow:#?}");
    env.assert_no_errors();
}

/// The connections are silent for longer than half the period of the time in a TSval (32.8 s).
#[test]
fn idle_connection_continues() {
    skip_if!(missing_bpf_rights());
    expect_idle_connections_continue(Family::Ipv4);
}

#[test]
fn idle_ipv6_connection_continues() {
    skip_if!(missing_bpf_rights());
    expect_idle_connections_continue(Family::Ipv6);
}

fn expect_idle_connections_continue(family: Family) {
    let env = TestEnv::of(family, ServiceMode::default());
    assert_resumes_after(&env, &[33, 36, 40], &[false]);
    // Several segments may be clamped before the client returns the first of their TSvals.
    let held = env.counter(intf::SERVER_COUNTER_TSVAL_CLAMPED);
    assert!(held >= 9, "{held} packets held");
    assert_eq!(env.counter(intf::SERVER_COUNTER_TSVAL_CLAMP_CONFIRMED), 9);
}

/// The connections are silent for about multiples of half the period of the time in a TSval, up to two periods.
#[test]
#[ignore = "takes 140 s"]
fn connections_idle_for_any_time_continue() {
    skip_if!(missing_bpf_rights());
    let silences = [32, 33, 40, 50, 60, 64, 65, 66, 70, 80, 95, 97, 98, 99, 105, 115, 125, 130, 131, 132, 135, 140];
    assert_resumes_after(&TestEnv::new(), &silences, &[false, true]);
}
