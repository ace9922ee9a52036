//! Each kind of check against servers of this machine's loopback, and the checker's thread with them.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use coreward_health::checker::{CheckedService, Checker};
use coreward_health::probe::{ProbeError, Prober};
use coreward_model::health::{
    CertificateVerification, HealthCheck, HealthVerdict, HttpProbe, Jitter, Probe, ProbeAddress, StatusRange,
    Thresholds,
};
use rustls::crypto::ring;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::PrivateKeyDer;

fn check(probe: Probe) -> Arc<HealthCheck> {
    Arc::new(HealthCheck {
        probe,
        probe_address: ProbeAddress::Server,
        port: None,
        interval: Duration::from_millis(20),
        timeout: Duration::from_secs(20),
        thresholds: Thresholds::new(2, 3).unwrap(),
        jitter: Jitter::new(0.5).unwrap(),
    })
}

fn http(host: Option<&str>) -> HttpProbe {
    HttpProbe {
        path: "/healthz".to_owned(),
        host: host.map(str::to_owned),
        expected_status: StatusRange::success_or_redirect(),
    }
}

fn listen() -> (TcpListener, SocketAddr) {
    listen_at(Ipv4Addr::LOCALHOST.into())
}

fn listen_at(address: IpAddr) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Answers every request on a connection from `accept` with the current value of `status`.
fn serve<C: std::io::Read + std::io::Write>(
    listener: TcpListener,
    status: Arc<AtomicU16>,
    accept: impl Fn(TcpStream) -> C + Send + 'static,
) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut connection = accept(stream.unwrap());
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && connection.read(&mut byte).is_ok_and(|read| read == 1) {
                request.push(byte[0]);
            }
            let good = request.starts_with(b"GET /healthz HTTP/1.1\r\n") && request.windows(6).any(|w| w == b"host: ");
            let status = if good { status.load(Ordering::Relaxed) } else { 400 };
            let _ = write!(connection, "HTTP/1.1 {status} So\r\ncontent-length: 2\r\n\r\nok");
            let _ = connection.flush();
        }
    });
}

fn run_probe(probe: Probe, vip: SocketAddr) -> Result<(), ProbeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let prober = Prober::new(check(probe), vip, None);
    runtime.block_on(prober.probe(vip.ip()))
}

#[test]
fn tcp_connection_decides() {
    let (_listener, address) = listen();
    assert_eq!(run_probe(Probe::Tcp, address), Ok(()));
    // Taken, so that no other test gets the port, without a listener.
    let taken = tokio::net::TcpSocket::new_v4().unwrap();
    taken.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    assert_eq!(run_probe(Probe::Tcp, taken.local_addr().unwrap()), Err(ProbeError::ConnectionRefused));
}

#[test]
fn server_with_an_ipv6_address() {
    let (listener, address) = listen_at(Ipv6Addr::LOCALHOST.into());
    serve(listener, Arc::new(AtomicU16::new(200)), |stream| stream);
    assert_eq!(run_probe(Probe::Tcp, address), Ok(()));
    assert_eq!(run_probe(Probe::Http(http(None)), address), Ok(()));
}

#[test]
fn ipv4_server_of_an_ipv6_vip_is_checked_at_its_own_address() {
    let (_listener, address) = listen();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let vip = SocketAddr::new("2001:db8::1".parse().unwrap(), address.port());
    let prober = Prober::new(check(Probe::Tcp), vip, None);
    assert_eq!(runtime.block_on(prober.probe(address.ip())), Ok(()));
}

#[test]
fn http_status_decides() {
    let (listener, address) = listen();
    let status = Arc::new(AtomicU16::new(200));
    serve(listener, status.clone(), |stream| stream);
    assert_eq!(run_probe(Probe::Http(http(None)), address), Ok(()));
    assert_eq!(run_probe(Probe::Http(http(Some("www.example.org"))), address), Ok(()));
    status.store(500, Ordering::Relaxed);
    let error = run_probe(Probe::Http(http(None)), address).unwrap_err().to_string();
    assert!(error.starts_with("answers 500 Internal Server Error: expected 200-399"), "{error}");
    let only = HttpProbe { expected_status: StatusRange::new(500, 500).unwrap(), ..http(None) };
    assert_eq!(run_probe(Probe::Http(only), address), Ok(()));
}

#[test]
fn silent_server_times_out() {
    let (_listener, address) = listen();
    let quick = HealthCheck { timeout: Duration::from_millis(50), ..(*check(Probe::Http(http(None)))).clone() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let prober = Prober::new(Arc::new(quick), address, None);
    assert_eq!(runtime.block_on(prober.probe(address.ip())), Err(ProbeError::TimedOut(Duration::from_millis(50))));
}

#[test]
fn answer_without_http_is_named() {
    let (listener, address) = listen();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"220 mail ready\r\n");
        }
    });
    let error = run_probe(Probe::Http(http(None)), address).unwrap_err().to_string();
    assert!(error.starts_with("HTTP: "), "{error}");
}

#[test]
fn https_certificate_is_verified() {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = parameters.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::new(parameters, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["www.example.org".to_owned(), "127.0.0.1".to_owned(), "2001:db8::1".to_owned()];
    let certificate = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    let server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        .unwrap();
    let server = Arc::new(server);
    let (listener, address) = listen();
    let accept = move |stream| StreamOwned::new(ServerConnection::new(server.clone()).unwrap(), stream);
    serve(listener, Arc::new(AtomicU16::new(204)), accept);

    let https = |host: Option<&str>, verification: CertificateVerification| {
        run_probe(Probe::Https(http(host), verification), address)
    };
    let ours = CertificateVerification::Authorities(authority.pem());
    assert_eq!(https(None, ours.clone()), Ok(()));
    assert_eq!(https(Some("www.example.org:8443"), ours.clone()), Ok(()));
    assert_eq!(https(Some("[2001:db8::1]"), ours.clone()), Ok(()));
    assert_eq!(https(Some("[2001:db8::1]:8443"), ours.clone()), Ok(()));
    let other_name = https(Some("www.example.net"), ours).unwrap_err().to_string();
    assert!(other_name.starts_with("TLS: invalid peer certificate: certificate not valid for name"), "{other_name}");
    let (other_key, parameters) = (rcgen::KeyPair::generate().unwrap(), rcgen::CertificateParams::default());
    let other = CertificateVerification::Authorities(parameters.self_signed(&other_key).unwrap().pem());
    let stranger = https(None, other).unwrap_err().to_string();
    assert!(stranger.starts_with("TLS: invalid peer certificate: "), "{stranger}");
    assert_eq!(https(Some("www.example.net"), CertificateVerification::Off), Ok(()));
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn checker_follows_the_servers_status() {
    let (listener, address) = listen();
    let status = Arc::new(AtomicU16::new(200));
    serve(listener, status.clone(), |stream| stream);
    let checker: Checker<u8> = Checker::start().unwrap();
    let check = check(Probe::Http(http(None)));
    let service = |keys: &[u8]| {
        let servers = keys.iter().map(|key| (*key, address.ip())).collect();
        vec![CheckedService { check: check.clone(), vip: address, servers, nat_table: None }]
    };
    let verdict = |key: u8| {
        let found = checker.results();
        found.into_iter().find(|(known, _)| *known == key).map(|(_, found)| (found.verdict(), found.check_count))
    };
    checker.set_services(service(&[1, 2]));
    eventually("both are up", || [1, 2].iter().all(|key| matches!(verdict(*key), Some((Some(HealthVerdict::Up), _)))));
    status.store(503, Ordering::Relaxed);
    eventually("both are down", || {
        [1, 2].iter().all(|key| matches!(verdict(*key), Some((Some(HealthVerdict::Down), _))))
    });
    let (_, failed) = checker.results().remove(0);
    assert!(failed.failure_count >= 3 && failed.last_error.starts_with("answers 503"), "{failed:?}");

    // Unchanged checks continue; removed ones are forgotten.
    let before = verdict(1).unwrap().1;
    checker.set_services(service(&[1, 3]));
    eventually("the third is known", || verdict(3).is_some());
    assert_eq!(verdict(2), None);
    assert!(verdict(1).unwrap().1 >= before);
    status.store(200, Ordering::Relaxed);
    eventually("it is up again", || matches!(verdict(1), Some((Some(HealthVerdict::Up), _))));
    checker.set_services(Vec::new());
    eventually("nothing is checked", || checker.results().is_empty());
}
