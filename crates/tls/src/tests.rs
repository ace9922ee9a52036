//! Tests of which peers are accepted and rejected, over loopback.

mod interrupted;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt as _;

use crate::acceptor::AcceptedConnection;
use crate::atomic_file_writes::interruption;
use crate::authority::{AuthorityRolloverStep, CertificateAuthority, CertificateValidity, DAY};
use crate::certificate::{CertificateFingerprint, unix_now};
use crate::connect::GrpcConnector;
use crate::failure::{ConnectionFailureCounters, ConnectionFailureReason};
use crate::identity::{FleetIdentity, FleetRole, IdentityName};
use crate::io::PlainOrTlsStream;
use crate::verify::RevocationList;
use crate::{
    AcceptorLimits, ClientCertificatePolicy, ConnectionAcceptor, ConnectionCaller, ReloadableTlsCredentials,
    TlsCredentialFiles, read_certificates,
};

const TLS_TEST_TIMEOUT: Duration = Duration::from_secs(30);
const ACCEPTED_ROLES: &[FleetRole] = &[FleetRole::Agent, FleetRole::Lb];

/// Fleet of a test, with its certificate authority.
struct TestFleet {
    directory: tempfile::TempDir,
    name: IdentityName,
    authority: CertificateAuthority,
}

impl TestFleet {
    fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let name: IdentityName = name.parse().unwrap();
        let authority = CertificateAuthority::init(&directory.path().join("authority"), &name, 30 * DAY).unwrap();
        Self { directory, name, authority }
    }

    fn certificate_bundle_path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn issue_certificate_bundle(
        &self,
        role: FleetRole,
        name: &str,
        validity: CertificateValidity,
    ) -> TlsCredentialFiles {
        self.try_issue_certificate_bundle(role, name, validity).unwrap()
    }

    fn try_issue_certificate_bundle(
        &self,
        role: FleetRole,
        name: &str,
        validity: CertificateValidity,
    ) -> anyhow::Result<TlsCredentialFiles> {
        let identity = FleetIdentity { fleet: self.name.clone(), role, name: name.parse().unwrap() };
        let bundle_path = self.certificate_bundle_path(name);
        self.authority.issue_certificate(&identity, &[], validity)?.write_files(&bundle_path, &self.authority)?;
        Ok(TlsCredentialFiles {
            ca_path: bundle_path.join("ca.crt"),
            certificate_path: bundle_path.join("own.crt"),
            key_path: bundle_path.join("own.key"),
        })
    }

    fn issue_and_load_credentials(&self, role: FleetRole, name: &str) -> Arc<ReloadableTlsCredentials> {
        ReloadableTlsCredentials::load_from_files(self.issue_certificate_bundle(
            role,
            name,
            CertificateValidity::from_now(DAY),
        ))
        .unwrap()
    }
}

/// Listener of a test. It answers each connection with the identity of the caller.
struct TestListener {
    address: SocketAddr,
    acceptor: Arc<ConnectionAcceptor>,
    failure_counters: Arc<ConnectionFailureCounters>,
    revocation_list: RevocationList,
}

impl TestListener {
    async fn start(tls: Option<Arc<ReloadableTlsCredentials>>, limits: AcceptorLimits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (failures, revoked) = (Arc::new(ConnectionFailureCounters::default()), RevocationList::default());
        let acceptor = match tls {
            Some(tls) => {
                let (client_certificates, revoked) = (ClientCertificatePolicy::Required, revoked.clone());
                ConnectionAcceptor::with_tls(
                    tls,
                    ACCEPTED_ROLES,
                    client_certificates,
                    &["h2"],
                    revoked,
                    limits,
                    failures.clone(),
                )
            }
            None => ConnectionAcceptor::without_tls(limits, failures.clone()),
        };
        let mut connections = Box::pin(acceptor.clone().accepted_connections(listener));
        tokio::spawn(async move {
            while let Some(Ok(connection)) = connections.next().await {
                tokio::spawn(answer_with_peer_identity(connection));
            }
        });
        Self { address, acceptor, failure_counters: failures, revocation_list: revoked }
    }

    /// Connects with the credentials in `tls`. Returns the listener's answer, or the error as text.
    async fn connect_and_read_answer(&self, tls: &Arc<ReloadableTlsCredentials>) -> Result<String, String> {
        let connector = GrpcConnector::new(self.address, Some((tls.clone(), &[FleetRole::Controller])));
        let mut stream = connector.connect().await.map_err(|error| error.to_string())?;
        request_identity(&mut stream).await
    }

    fn has_counted_failure(&self, reason: ConnectionFailureReason) -> bool {
        self.failure_counters
            .failure_counts_by_reason()
            .iter()
            .any(|(failure_reason, count)| *failure_reason == reason && *count > 0)
    }

    async fn wait_for_failure(&self, reason: ConnectionFailureReason) {
        let wait_for_counter = async {
            while !self.has_counted_failure(reason) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let wait_result = tokio::time::timeout(TLS_TEST_TIMEOUT, wait_for_counter).await;
        assert!(
            wait_result.is_ok(),
            "{reason:?} was not counted: {:?}",
            self.failure_counters.failure_counts_by_reason()
        );
    }
}

async fn answer_with_peer_identity(mut connection: AcceptedConnection) {
    let caller: ConnectionCaller = connection.caller().clone();
    let caller_name = caller.identity.map_or_else(|| "somebody".to_owned(), |identity| identity.to_string());
    while connection.read_u8().await.is_ok() {
        connection.write_all(format!("{caller_name}\n").as_bytes()).await.unwrap();
        connection.flush().await.unwrap();
    }
}

async fn request_identity(stream: &mut PlainOrTlsStream) -> Result<String, String> {
    let identity_exchange = async {
        stream.write_all(b"?").await?;
        stream.flush().await?;
        let mut answer = Vec::new();
        loop {
            match stream.read_u8().await? {
                b'\n' => return Ok(String::from_utf8(answer).unwrap()),
                byte => answer.push(byte),
            }
        }
    };
    let answer: Result<std::io::Result<String>, _> = tokio::time::timeout(TLS_TEST_TIMEOUT, identity_exchange).await;
    answer.expect("an answer in time").map_err(|error| error.to_string())
}

#[test]
fn moved_connection_survives_the_end_of_its_first_runtime() {
    let start_runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (accept_runtime, serve_runtime, client_runtime) = (start_runtime(), start_runtime(), start_runtime());
    let fleet = TestFleet::new("prod");
    let (controller, balancer) = (
        fleet.issue_and_load_credentials(FleetRole::Controller, "c1"),
        fleet.issue_and_load_credentials(FleetRole::Lb, "lb1"),
    );
    let (client_certificates, failures) = (ClientCertificatePolicy::Required, Arc::default());
    let acceptor = ConnectionAcceptor::with_tls(
        controller,
        ACCEPTED_ROLES,
        client_certificates,
        &["h2"],
        RevocationList::default(),
        AcceptorLimits::default(),
        failures,
    );
    let (connection, client) = accept_runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connector = GrpcConnector::new(listener.local_addr().unwrap(), Some((balancer, &[FleetRole::Controller])));
        let client = client_runtime.spawn(async move { connector.connect().await.unwrap() });
        let connection = Box::pin(acceptor.accepted_connections(listener)).next().await.unwrap().unwrap();
        (connection.move_to_runtime(serve_runtime.handle()).unwrap(), client)
    });
    drop(accept_runtime);
    serve_runtime.spawn(answer_with_peer_identity(connection));
    let answer_text = client_runtime.block_on(async { request_identity(&mut client.await.unwrap()).await });
    assert_eq!(answer_text.unwrap(), "lb lb1");
}

#[tokio::test]
async fn certificate_of_same_fleet_identifies_the_peer() {
    let fleet = TestFleet::new("prod");
    let listener = TestListener::start(
        Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")),
        AcceptorLimits::default(),
    )
    .await;
    assert_eq!(
        listener.connect_and_read_answer(&fleet.issue_and_load_credentials(FleetRole::Agent, "s1")).await.unwrap(),
        "agent s1"
    );
    assert_eq!(
        listener.connect_and_read_answer(&fleet.issue_and_load_credentials(FleetRole::Lb, "lb1")).await.unwrap(),
        "lb lb1"
    );
    assert!(
        listener.failure_counters.failure_counts_by_reason().iter().all(|(_, count)| *count == 0),
        "{:?}",
        listener.failure_counters.failure_counts_by_reason()
    );
}

/// Checks that both peers report the reason of a rejection, if a TLS alert exists for this reason.
#[tokio::test]
async fn invalid_certificates_are_rejected_with_reason() {
    let fleet = TestFleet::new("prod");
    // Signed by the same authority, but for another fleet.
    let foreign_fleet = TestFleet {
        directory: tempfile::tempdir().unwrap(),
        name: "test".parse().unwrap(),
        authority: CertificateAuthority::open(&fleet.certificate_bundle_path("authority")).unwrap(),
    };
    let listener = TestListener::start(
        Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")),
        AcceptorLimits::default(),
    )
    .await;
    let now = unix_now();
    let expired_validity = CertificateValidity { not_before: now - 2 * DAY, not_after: now - DAY };
    let future_validity = CertificateValidity { not_before: now + DAY, not_after: now + 2 * DAY };
    let issue_with_validity = |role, name, validity| {
        ReloadableTlsCredentials::load_from_files(fleet.issue_certificate_bundle(role, name, validity)).unwrap()
    };
    let cases = [
        (
            issue_with_validity(FleetRole::Viewer, "v", CertificateValidity::from_now(DAY)),
            ConnectionFailureReason::WrongRole,
            "wrong fleet, role or name",
        ),
        (
            foreign_fleet.issue_and_load_credentials(FleetRole::Agent, "s1"),
            ConnectionFailureReason::OtherFleet,
            "its certificate is for controller c1 of fleet prod",
        ),
        (
            issue_with_validity(FleetRole::Agent, "old", expired_validity),
            ConnectionFailureReason::ExpiredCertificate,
            "by the peer's clock it has expired or is not valid yet",
        ),
        (
            issue_with_validity(FleetRole::Agent, "new", future_validity),
            ConnectionFailureReason::NotYetValidCertificate,
            "by the peer's clock it has expired or is not valid yet",
        ),
    ];
    for (tls, reason, expected_text) in cases {
        assert_connection_rejected(&listener, &tls, reason, expected_text).await;
    }
}

/// Asserts that a connection with `tls` is rejected. If the fleets differ, the client detects this before the listener.
async fn assert_connection_rejected(
    listener: &TestListener,
    tls: &Arc<ReloadableTlsCredentials>,
    reason: ConnectionFailureReason,
    expected_text: &str,
) {
    let error = listener.connect_and_read_answer(tls).await.unwrap_err();
    assert!(error.contains(expected_text), "{reason:?}: {error}");
    if reason == ConnectionFailureReason::OtherFleet {
        // The client has sent an alert.
        listener.wait_for_failure(ConnectionFailureReason::RejectedByPeer).await;
    } else {
        assert!(error.starts_with("the peer rejects our certificate: "), "{error}");
        listener.wait_for_failure(reason).await;
    }
}

#[tokio::test]
async fn certificates_of_foreign_authorities_are_rejected() {
    let (fleet, other_fleet) = (TestFleet::new("prod"), TestFleet::new("test"));
    let listener = TestListener::start(
        Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")),
        AcceptorLimits::default(),
    )
    .await;
    // The authorities differ, so each side would reject the other. The client is the first to reject.
    let error = listener
        .connect_and_read_answer(&other_fleet.issue_and_load_credentials(FleetRole::Agent, "s1"))
        .await
        .unwrap_err();
    assert_eq!(error, "its certificate is signed by no authority in `ca`");
    // The client's authority has the same name as the fleet's, and the client trusts the controller.
    let impostor_fleet = TestFleet::new("prod");
    let impostor_files =
        impostor_fleet.issue_certificate_bundle(FleetRole::Agent, "s1", CertificateValidity::from_now(DAY));
    let impostor_files = TlsCredentialFiles { ca_path: fleet.authority.ca_path(), ..impostor_files };
    let error = listener
        .connect_and_read_answer(&ReloadableTlsCredentials::load_from_files(impostor_files).unwrap())
        .await
        .unwrap_err();
    assert!(error.contains("its signer is not in the peer's `ca`"), "{error}");
    listener.wait_for_failure(ConnectionFailureReason::UnknownAuthority).await;
}

#[tokio::test]
async fn server_certificate_must_have_the_controller_role() {
    let fleet = TestFleet::new("prod");
    // An agent's certificate does not permit it to act as a server.
    let listener =
        TestListener::start(Some(fleet.issue_and_load_credentials(FleetRole::Agent, "s9")), AcceptorLimits::default())
            .await;
    let error =
        listener.connect_and_read_answer(&fleet.issue_and_load_credentials(FleetRole::Agent, "s1")).await.unwrap_err();
    assert!(error.starts_with("its certificate is wrong: InvalidPurpose"), "{error}");
    // A rack controller's certificate permits it to act as a server, but not as a controller.
    let listener =
        TestListener::start(Some(fleet.issue_and_load_credentials(FleetRole::Rack, "r1")), AcceptorLimits::default())
            .await;
    let error =
        listener.connect_and_read_answer(&fleet.issue_and_load_credentials(FleetRole::Agent, "s1")).await.unwrap_err();
    assert_eq!(error, "its certificate is for rack r1: expected controller");
}

#[tokio::test]
async fn plain_and_tls_endpoints_reject_each_other() {
    let fleet = TestFleet::new("prod");
    let listener = TestListener::start(
        Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")),
        AcceptorLimits::default(),
    )
    .await;
    let mut plain_stream = TcpStream::connect(listener.address).await.unwrap();
    plain_stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    listener.wait_for_failure(ConnectionFailureReason::NotTls).await;
    // The client uses TLS, and the listener does not.
    let plain_listener = TestListener::start(None, AcceptorLimits::default()).await;
    let error = plain_listener
        .connect_and_read_answer(&fleet.issue_and_load_credentials(FleetRole::Agent, "s1"))
        .await
        .unwrap_err();
    assert!(error.contains("does not speak TLS 1.3"), "{error}");
}

#[tokio::test]
async fn silent_connections_occupy_limited_slots_until_timeout() {
    let fleet = TestFleet::new("prod");
    let limits = AcceptorLimits {
        handshake_timeout: Duration::from_secs(1),
        max_handshakes_per_address: 3,
        ..AcceptorLimits::default()
    };
    let listener =
        TestListener::start(Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")), limits).await;
    let agent = fleet.issue_and_load_credentials(FleetRole::Agent, "s1");
    let mut silent_streams = Vec::new();
    let wait_for_rejection = async {
        while !listener.has_counted_failure(ConnectionFailureReason::TooManyConnections) {
            silent_streams.push(TcpStream::connect(listener.address).await.unwrap());
        }
    };
    tokio::time::timeout(TLS_TEST_TIMEOUT, wait_for_rejection).await.expect("one too many");
    listener.wait_for_failure(ConnectionFailureReason::Timeout).await;
    let reconnect = async {
        while listener.connect_and_read_answer(&agent).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TLS_TEST_TIMEOUT, reconnect).await.expect("places are free again");
}

#[tokio::test]
async fn number_of_connections_per_identity_is_limited() {
    let fleet = TestFleet::new("prod");
    let limits = AcceptorLimits { max_connections_per_identity: 2, ..AcceptorLimits::default() };
    let listener =
        TestListener::start(Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")), limits).await;
    let agent = fleet.issue_and_load_credentials(FleetRole::Agent, "s1");
    let connector = GrpcConnector::new(listener.address, Some((agent.clone(), &[FleetRole::Controller])));
    let mut open_streams = Vec::new();
    for _ in 0..2 {
        let mut stream = connector.connect().await.unwrap();
        request_identity(&mut stream).await.unwrap();
        open_streams.push(stream);
    }
    assert!(listener.connect_and_read_answer(&agent).await.is_err());
    listener.wait_for_failure(ConnectionFailureReason::TooManyConnections).await;
    assert!(
        listener.connect_and_read_answer(&fleet.issue_and_load_credentials(FleetRole::Agent, "s2")).await.is_ok(),
        "others are not concerned"
    );
    drop(open_streams);
    let reconnect = async {
        while listener.connect_and_read_answer(&agent).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TLS_TEST_TIMEOUT, reconnect).await.expect("places are free again");
}

/// Checks that revoking a certificate closes its open connection and rejects new ones.
#[tokio::test]
async fn revocation_closes_open_connections() {
    let fleet = TestFleet::new("prod");
    let listener = TestListener::start(
        Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")),
        AcceptorLimits::default(),
    )
    .await;
    let agent = fleet.issue_and_load_credentials(FleetRole::Agent, "s1");
    let connector = GrpcConnector::new(listener.address, Some((agent.clone(), &[FleetRole::Controller])));
    let mut stream = connector.connect().await.unwrap();
    request_identity(&mut stream).await.unwrap();
    let fingerprint: CertificateFingerprint =
        agent.labelled_certificates()[0].1.fingerprint.to_string().parse().unwrap();
    listener.revocation_list.replace_fingerprints([fingerprint]);
    let result = tokio::time::timeout(TLS_TEST_TIMEOUT, stream.read_u8()).await.expect("an end in time");
    assert!(result.is_err());
    let error = listener.connect_and_read_answer(&agent).await.unwrap_err();
    assert!(error.contains("or revoked"), "{error}");
    listener.wait_for_failure(ConnectionFailureReason::RevokedCertificate).await;
}

#[tokio::test]
async fn connection_is_closed_when_certificate_expires() {
    let fleet = TestFleet::new("prod");
    let listener = TestListener::start(
        Some(fleet.issue_and_load_credentials(FleetRole::Controller, "c1")),
        AcceptorLimits::default(),
    )
    .await;
    let agent = fleet.issue_and_load_credentials(FleetRole::Agent, "s1");
    let connector = GrpcConnector::new(listener.address, Some((agent, &[FleetRole::Controller])));
    let mut stream = connector.connect().await.unwrap();
    listener.acceptor.close_invalid_connections_at(unix_now() + DAY / 2);
    request_identity(&mut stream).await.expect("the certificate is still valid");
    listener.acceptor.close_invalid_connections_at(unix_now() + 2 * DAY);
    let result = tokio::time::timeout(TLS_TEST_TIMEOUT, stream.read_u8()).await.expect("an end in time");
    assert!(result.is_err());
}

/// Checks that daemons which read their files at different times trust each other throughout an authority's
/// replacement. A connection lasts as long as the authority of its certificate is trusted.
#[tokio::test]
async fn authority_replacement_causes_no_rejections() {
    let fleet = TestFleet::new("prod");
    let controller = fleet.issue_and_load_credentials(FleetRole::Controller, "c1");
    let agent = fleet.issue_and_load_credentials(FleetRole::Agent, "s1");
    let listener = TestListener::start(Some(controller.clone()), AcceptorLimits::default()).await;
    let connector = GrpcConnector::new(listener.address, Some((agent.clone(), &[FleetRole::Controller])));
    let mut open_stream = connector.connect().await.unwrap();
    let renew_certificate = |role, name, tls: &Arc<ReloadableTlsCredentials>| {
        fleet.issue_certificate_bundle(role, name, CertificateValidity::from_now(DAY));
        tls.reload_credentials().unwrap();
    };
    let old_certificates = controller.labelled_certificates();
    for step in [AuthorityRolloverStep::Begin, AuthorityRolloverStep::Switch, AuthorityRolloverStep::Finish] {
        fleet.authority.perform_rollover_step(step, 30 * DAY).unwrap();
        // First only the agent completes the step, and then the controller does, too.
        renew_certificate(FleetRole::Agent, "s1", &agent);
        assert_eq!(listener.connect_and_read_answer(&agent).await.unwrap(), "agent s1", "{step:?}: the agent first");
        renew_certificate(FleetRole::Controller, "c1", &controller);
        assert_eq!(listener.connect_and_read_answer(&agent).await.unwrap(), "agent s1", "{step:?}: both");
        if step != AuthorityRolloverStep::Finish {
            assert_eq!(request_identity(&mut open_stream).await.unwrap(), "agent s1");
        }
    }
    // The old authority is no longer trusted, so only a client with a new certificate can reconnect.
    let result = tokio::time::timeout(TLS_TEST_TIMEOUT, open_stream.read_u8()).await.expect("an end in time");
    assert!(result.is_err());
    assert!(fleet.authority.perform_rollover_step(AuthorityRolloverStep::Finish, DAY).is_err(), "it is over");
    let new_certificates = controller.labelled_certificates();
    assert_eq!((old_certificates.len(), new_certificates.len()), (2, 2));
    assert_ne!(old_certificates[1].1.fingerprint, new_certificates[1].1.fingerprint, "another authority");
}

#[tokio::test]
async fn failed_reload_keeps_the_old_credentials() {
    let fleet = TestFleet::new("prod");
    let files = fleet.issue_certificate_bundle(FleetRole::Agent, "s1", CertificateValidity::from_now(DAY));
    let agent = ReloadableTlsCredentials::load_from_files(files.clone()).unwrap();
    let other_files = fleet.issue_certificate_bundle(FleetRole::Agent, "s2", CertificateValidity::from_now(DAY));
    let reload_error_text = |tls: &ReloadableTlsCredentials| tls.reload_credentials().unwrap_err().to_string();

    std::fs::copy(&other_files.key_path, &files.key_path).unwrap();
    assert!(reload_error_text(&agent).contains("expected the key of"), "{}", reload_error_text(&agent));
    std::fs::copy(&other_files.certificate_path, &files.certificate_path).unwrap();
    assert!(
        reload_error_text(&agent).ends_with("it is for agent s2, and this process is agent s1: expected a restart")
    );
    std::fs::write(&files.ca_path, "").unwrap();
    assert!(reload_error_text(&agent).ends_with("ca.crt: no certificate in it: expected at least one, in PEM"));
    std::fs::copy(&other_files.certificate_path, &files.ca_path).unwrap();
    assert!(reload_error_text(&agent).contains("cannot sign certificates: expected certificates of authorities"));
    assert_eq!(agent.identity().to_string(), "agent s1");
}

#[test]
fn key_files_are_private_and_expiry_causes_warning() {
    use std::os::unix::fs::PermissionsExt as _;
    let fleet = TestFleet::new("prod");
    let now = unix_now();
    let expiring_validity =
        CertificateValidity { not_before: now - 9 * DAY, not_after: now + DAY + Duration::from_secs(5) };
    let files = fleet.issue_certificate_bundle(FleetRole::Agent, "s1", expiring_validity);
    let file_permission_bits = |path: &PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((file_permission_bits(&files.key_path), file_permission_bits(&files.certificate_path)), (0o600, 0o644));
    assert_eq!(file_permission_bits(&fleet.certificate_bundle_path("authority").join("authority.key")), 0o600);
    assert_eq!(
        ReloadableTlsCredentials::load_from_files(files.clone()).unwrap().expiry_warnings(),
        ["our certificate ends in 1day: `coreward certs renew`"]
    );
    std::fs::set_permissions(&files.key_path, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(
        ReloadableTlsCredentials::load_from_files(files.clone())
            .unwrap_err()
            .to_string()
            .contains("expected `chmod 600")
    );
    assert_eq!(
        read_certificates(&files.certificate_path).unwrap()[0].identity.as_ref().unwrap().identity_uri(),
        "coreward://prod/agent/s1"
    );
    // No certificate may outlive the authority that signs it.
    let identity = FleetIdentity { fleet: fleet.name.clone(), role: FleetRole::Agent, name: "s1".parse().unwrap() };
    let error =
        fleet.authority.issue_certificate(&identity, &[], CertificateValidity::from_now(31 * DAY)).err().unwrap();
    assert!(
        error.to_string().starts_with("the authority ends before this certificate would: expected at most 29 days"),
        "{error}"
    );
}
