//! Tests of each kind of check and the checker's thread, with servers on loopback.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use coreward_health::checker::{CheckedService, HealthChecker};
use coreward_health::probe::{HealthProber, ProbeError};
use coreward_model::health::{
    CertificateVerification, HealthCheck, HealthCheckJitter, HealthProbe, HealthVerdict, HealthVerdictThresholds,
    HttpProbe, HttpStatusRange, ProbeAddress,
};
use rustls::crypto::ring;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::PrivateKeyDer;

fn build_health_check(probe: HealthProbe) -> Arc<HealthCheck> {
    Arc::new(HealthCheck {
        probe,
        probe_address: ProbeAddress::Server,
        probe_port: None,
        interval: Duration::from_millis(20),
        timeout: Duration::from_secs(20),
        thresholds: HealthVerdictThresholds::new(2, 3).unwrap(),
        jitter: HealthCheckJitter::new(0.5).unwrap(),
    })
}

fn build_http_probe(host: Option<&str>) -> HttpProbe {
    HttpProbe {
        path_and_query: "/healthz".to_owned(),
        host: host.map(str::to_owned),
        expected_status: HttpStatusRange::success_or_redirect(),
    }
}

fn listen_on_loopback() -> (TcpListener, SocketAddr) {
    listen_on_address(Ipv4Addr::LOCALHOST.into())
}

fn listen_on_address(address: IpAddr) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Answers each HTTP request with the current value of `status`. `accept` converts a TCP connection to the stream from
/// which the request is read.
fn serve_http_status<C: std::io::Read + std::io::Write>(
    listener: TcpListener,
    status: Arc<AtomicU16>,
    accept: impl Fn(TcpStream) -> C + Send + 'static,
) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut connection = accept(stream.unwrap());
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && connection.read(&mut byte).is_ok_and(|byte_count| byte_count == 1)
            {
                request.push(byte[0]);
            }
            let is_expected_request =
                request.starts_with(b"GET /healthz HTTP/1.1\r\n") && request.windows(6).any(|w| w == b"host: ");
            let response_status = if is_expected_request { status.load(Ordering::Relaxed) } else { 400 };
            let _ = write!(connection, "HTTP/1.1 {response_status} So\r\ncontent-length: 2\r\n\r\nok");
            let _ = connection.flush();
        }
    });
}

fn run_probe(probe: HealthProbe, vip: SocketAddr) -> Result<(), ProbeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let prober = HealthProber::new(build_health_check(probe), vip, None);
    runtime.block_on(prober.probe_server(vip.ip()))
}

#[test]
fn tcp_check_passes_if_a_connection_is_established() {
    let (_listener, address) = listen_on_loopback();
    assert_eq!(run_probe(HealthProbe::Tcp, address), Ok(()));
    // A bound socket without a listener, so that no other test gets the port.
    let non_listening_socket = tokio::net::TcpSocket::new_v4().unwrap();
    non_listening_socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    assert_eq!(
        run_probe(HealthProbe::Tcp, non_listening_socket.local_addr().unwrap()),
        Err(ProbeError::ConnectionRefused)
    );
}

#[test]
fn server_with_an_ipv6_address_is_checked() {
    let (listener, address) = listen_on_address(Ipv6Addr::LOCALHOST.into());
    serve_http_status(listener, Arc::new(AtomicU16::new(200)), |stream| stream);
    assert_eq!(run_probe(HealthProbe::Tcp, address), Ok(()));
    assert_eq!(run_probe(HealthProbe::Http(build_http_probe(None)), address), Ok(()));
}

#[test]
fn ipv4_server_of_an_ipv6_vip_is_checked_at_its_own_address() {
    let (_listener, address) = listen_on_loopback();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let vip = SocketAddr::new("2001:db8::1".parse().unwrap(), address.port());
    let prober = HealthProber::new(build_health_check(HealthProbe::Tcp), vip, None);
    assert_eq!(runtime.block_on(prober.probe_server(address.ip())), Ok(()));
}

#[test]
fn http_check_passes_if_the_status_is_expected() {
    let (listener, address) = listen_on_loopback();
    let status = Arc::new(AtomicU16::new(200));
    serve_http_status(listener, status.clone(), |stream| stream);
    assert_eq!(run_probe(HealthProbe::Http(build_http_probe(None)), address), Ok(()));
    assert_eq!(run_probe(HealthProbe::Http(build_http_probe(Some("www.example.org"))), address), Ok(()));
    status.store(500, Ordering::Relaxed);
    let error = run_probe(HealthProbe::Http(build_http_probe(None)), address).unwrap_err().to_string();
    assert!(error.starts_with("answers 500 Internal Server Error: expected 200-399"), "{error}");
    let status_500_probe =
        HttpProbe { expected_status: HttpStatusRange::new(500, 500).unwrap(), ..build_http_probe(None) };
    assert_eq!(run_probe(HealthProbe::Http(status_500_probe), address), Ok(()));
}

#[test]
fn health_check_of_silent_server_times_out() {
    let (_listener, address) = listen_on_loopback();
    let short_timeout_check = HealthCheck {
        timeout: Duration::from_millis(50),
        ..(*build_health_check(HealthProbe::Http(build_http_probe(None)))).clone()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let prober = HealthProber::new(Arc::new(short_timeout_check), address, None);
    assert_eq!(
        runtime.block_on(prober.probe_server(address.ip())),
        Err(ProbeError::TimedOut(Duration::from_millis(50)))
    );
}

#[test]
fn answer_that_is_not_http_is_reported() {
    let (listener, address) = listen_on_loopback();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"220 mail ready\r\n");
        }
    });
    let error = run_probe(HealthProbe::Http(build_http_probe(None)), address).unwrap_err().to_string();
    assert!(error.starts_with("HTTP: "), "{error}");
}

/// Starts an HTTPS server with a certificate of a new authority. Returns its address and the authority's certificate.
fn start_https_server() -> (SocketAddr, String) {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut certificate_parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    certificate_parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_certificate = certificate_parameters.self_signed(&authority_key).unwrap();
    let ca_issuer = rcgen::Issuer::new(certificate_parameters, authority_key);
    let server_key = rcgen::KeyPair::generate().unwrap();
    let certificate_names = vec!["www.example.org".to_owned(), "127.0.0.1".to_owned(), "2001:db8::1".to_owned()];
    let server_certificate =
        rcgen::CertificateParams::new(certificate_names).unwrap().signed_by(&server_key, &ca_issuer).unwrap();
    let server_config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![server_certificate.der().clone()],
            PrivateKeyDer::try_from(server_key.serialize_der()).unwrap(),
        )
        .unwrap();
    let server_config = Arc::new(server_config);
    let (listener, address) = listen_on_loopback();
    let accept_tls = move |stream| StreamOwned::new(ServerConnection::new(server_config.clone()).unwrap(), stream);
    serve_http_status(listener, Arc::new(AtomicU16::new(204)), accept_tls);
    (address, ca_certificate.pem())
}

#[test]
fn https_certificate_is_verified() {
    let (address, ca_certificate) = start_https_server();
    let run_https_probe = |host: Option<&str>, verification: CertificateVerification| {
        run_probe(HealthProbe::Https(build_http_probe(host), verification), address)
    };
    let own_authority = CertificateVerification::PemAuthorities(ca_certificate);
    assert_eq!(run_https_probe(None, own_authority.clone()), Ok(()));
    assert_eq!(run_https_probe(Some("www.example.org:8443"), own_authority.clone()), Ok(()));
    assert_eq!(run_https_probe(Some("[2001:db8::1]"), own_authority.clone()), Ok(()));
    assert_eq!(run_https_probe(Some("[2001:db8::1]:8443"), own_authority.clone()), Ok(()));
    let wrong_name_error = run_https_probe(Some("www.example.net"), own_authority).unwrap_err().to_string();
    assert!(
        wrong_name_error.starts_with("TLS: invalid peer certificate: certificate not valid for name"),
        "{wrong_name_error}"
    );
    let (other_key, parameters) = (rcgen::KeyPair::generate().unwrap(), rcgen::CertificateParams::default());
    let other_authority = CertificateVerification::PemAuthorities(parameters.self_signed(&other_key).unwrap().pem());
    let unknown_authority_error = run_https_probe(None, other_authority).unwrap_err().to_string();
    assert!(unknown_authority_error.starts_with("TLS: invalid peer certificate: "), "{unknown_authority_error}");
    assert_eq!(run_https_probe(Some("www.example.net"), CertificateVerification::Off), Ok(()));
}

fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{description}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn checker_follows_the_http_status_of_the_server() {
    let (listener, address) = listen_on_loopback();
    let status = Arc::new(AtomicU16::new(200));
    serve_http_status(listener, status.clone(), |stream| stream);
    let checker: HealthChecker<u8> = HealthChecker::start().unwrap();
    let health_check = build_health_check(HealthProbe::Http(build_http_probe(None)));
    let build_checked_service = |keys: &[u8]| {
        let server_addresses_by_key = keys.iter().map(|key| (*key, address.ip())).collect();
        vec![CheckedService {
            health_check: health_check.clone(),
            vip: address,
            server_addresses_by_key,
            nat_table: None,
        }]
    };
    let verdict_and_check_count = |key: u8| {
        let (_, result) = checker.check_results().into_iter().find(|(result_key, _)| *result_key == key)?;
        Some((result.verdict(), result.check_count))
    };
    checker.set_checked_services(build_checked_service(&[1, 2]));
    wait_until("both are up", || {
        [1, 2].iter().all(|key| matches!(verdict_and_check_count(*key), Some((Some(HealthVerdict::Up), _))))
    });
    status.store(503, Ordering::Relaxed);
    wait_until("both are down", || {
        [1, 2].iter().all(|key| matches!(verdict_and_check_count(*key), Some((Some(HealthVerdict::Down), _))))
    });
    let (_, failed_result) = checker.check_results().remove(0);
    assert!(
        failed_result.failure_count >= 3 && failed_result.last_error.starts_with("answers 503"),
        "{failed_result:?}"
    );

    // Unchanged checks continue, and removed ones are forgotten.
    let check_count_before = verdict_and_check_count(1).unwrap().1;
    checker.set_checked_services(build_checked_service(&[1, 3]));
    wait_until("the third is known", || verdict_and_check_count(3).is_some());
    assert_eq!(verdict_and_check_count(2), None);
    assert!(verdict_and_check_count(1).unwrap().1 >= check_count_before);
    status.store(200, Ordering::Relaxed);
    wait_until("it is up again", || matches!(verdict_and_check_count(1), Some((Some(HealthVerdict::Up), _))));
    checker.set_checked_services(Vec::new());
    wait_until("nothing is checked", || checker.check_results().is_empty());
}
