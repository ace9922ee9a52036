//! Tests of the HTTP API beyond its own host, with TLS and a token or a certificate.

use std::path::{Path, PathBuf};

use coreward_api::types::RotateKeys;
use coreward_http::client::{ApiCredential, ControllerClient, ControllerUrl};
use coreward_http::tokens::token_file_path;
use coreward_http::{Problem, ProblemKind};
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::verify::ExpectedControllerHost;
use coreward_tls::{FleetIdentity, FleetRole, TlsCredentialFiles};

use crate::support::{RunningController, TestDirectory, with_timeout};

const WEB_SERVICE_TOML: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";

/// Controller whose API listens on all addresses with TLS, and the authority that issues its certificates.
struct ApiTlsTestEnv {
    test_directory: TestDirectory,
    authority: CertificateAuthority,
    controller: RunningController,
}

impl ApiTlsTestEnv {
    async fn start() -> Self {
        Self::start_with_certificate_for(&["127.0.0.1"]).await
    }

    /// Starts a controller whose certificate contains the names and addresses in `hosts`.
    async fn start_with_certificate_for(hosts: &[&str]) -> Self {
        let test_directory = TestDirectory::new(&["s1"], WEB_SERVICE_TOML);
        let authority = CertificateAuthority::init(
            &test_directory.temporary_directory.path().join("certs"),
            &"prod".parse().unwrap(),
            30 * DAY,
        )
        .unwrap();
        let controller_credentials = issue_credentials(&test_directory, &authority, FleetRole::Controller, "c1", hosts);
        let (ca, certificate, key) = (
            &controller_credentials.ca_path,
            &controller_credentials.certificate_path,
            &controller_credentials.key_path,
        );
        let tls_section = format!("[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n");
        test_directory.write_controller_config(&format!("fleet = \"fleet.toml\"\n{tls_section}"));
        let text = std::fs::read_to_string(test_directory.config_path()).unwrap();
        std::fs::write(test_directory.config_path(), text.replace("api = \"127.0.0.1:0\"", "api = \"0.0.0.0:0\""))
            .unwrap();
        let controller = test_directory.start_controller().await;
        Self { test_directory, authority, controller }
    }

    fn api_url(&self) -> String {
        format!("https://127.0.0.1:{}", self.controller.api_address.port())
    }

    fn issue_certificate(&self, role: FleetRole, name: &str) -> TlsCredentialFiles {
        issue_credentials(&self.test_directory, &self.authority, role, name, &[])
    }

    fn token_file_path(&self, role: coreward_api::Role) -> PathBuf {
        token_file_path(self.test_directory.temporary_directory.path(), role)
    }

    fn client_with_credential(&self, credential: ApiCredential) -> ControllerClient {
        self.client_for_url(&self.api_url(), credential, ExpectedControllerHost::Requested)
    }

    fn client_for_url(&self, url: &str, credential: ApiCredential, host: ExpectedControllerHost) -> ControllerClient {
        ControllerClient::with_controllers(vec![url.parse().unwrap()], &credential, host).unwrap()
    }

    /// Requests the path with curl. Returns the HTTP status, or curl's error message.
    async fn request_by_curl(&self, path: &str, options: &[&str]) -> Result<u16, String> {
        let mut command = tokio::process::Command::new("curl");
        command.args(["--silent", "--show-error", "--output", "/dev/null", "--write-out", "%{http_code}"]);
        command.args(options).arg(format!("{}{path}", self.api_url()));
        let output = with_timeout("curl", command.output()).await.unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap().parse().unwrap()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }
}

fn issue_credentials(
    test_directory: &TestDirectory,
    authority: &CertificateAuthority,
    role: FleetRole,
    name: &str,
    hosts: &[&str],
) -> TlsCredentialFiles {
    let identity = FleetIdentity { fleet: "prod".parse().unwrap(), role, name: name.parse().unwrap() };
    let directory = test_directory.temporary_directory.path().join(format!("{role}-{name}"));
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let certificate_and_key =
        authority.issue_certificate(&identity, &hosts, CertificateValidity::from_now(DAY)).unwrap();
    certificate_and_key.write_files(&directory, authority).unwrap();
    let build_file_path = |name: &str| directory.join(name);
    TlsCredentialFiles {
        ca_path: build_file_path("ca.crt"),
        certificate_path: build_file_path("own.crt"),
        key_path: build_file_path("own.key"),
    }
}

fn path_to_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Asserts that curl may authenticate by a token with TLS, or by a certificate without a token, and is rejected
/// otherwise.
#[tokio::test]
async fn curl_authenticates_by_token_or_certificate() {
    let env = ApiTlsTestEnv::start().await;
    let ca = env.issue_certificate(FleetRole::Viewer, "eve").ca_path;
    let trust_options = ["--cacert", path_to_str(&ca)];
    let viewer_token = std::fs::read_to_string(env.token_file_path(coreward_api::Role::Viewer)).unwrap();
    let viewer_header = format!("Authorization: Bearer {}", viewer_token.trim());
    let rotate_options = ["--request", "POST", "--json", "{}"];
    assert_eq!(env.request_by_curl("/v1/health", &trust_options).await, Ok(401));
    assert_eq!(
        env.request_by_curl("/v1/health", &[&trust_options[..], &["--header", &viewer_header]].concat()).await,
        Ok(200)
    );
    let untrusted_error = env.request_by_curl("/v1/health", &["--header", &viewer_header]).await.unwrap_err();
    assert!(untrusted_error.contains("certificate"), "{untrusted_error}");
    for (role, read_status, write_status) in [
        (FleetRole::Viewer, 200, 403),
        // The present key is too new for a rotation.
        (FleetRole::Operator, 200, 409),
        (FleetRole::Agent, 401, 401),
        (FleetRole::Lb, 401, 401),
        (FleetRole::Rack, 401, 401),
        (FleetRole::Controller, 401, 401),
    ] {
        let credentials = env.issue_certificate(role, "somebody");
        let certificate_options =
            ["--cert", path_to_str(&credentials.certificate_path), "--key", path_to_str(&credentials.key_path)];
        let curl_options = [&trust_options[..], &certificate_options].concat();
        assert_eq!(env.request_by_curl("/v1/status", &curl_options).await, Ok(read_status), "{role}");
        assert_eq!(
            env.request_by_curl("/v1/keys/rotate", &[&curl_options[..], &rotate_options].concat()).await,
            Ok(write_status),
            "{role}"
        );
    }
    let plain_http_url = env.api_url().replace("https", "http");
    let plain_http_result = with_timeout("an answer", reqwest::get(format!("{plain_http_url}/v1/health"))).await;
    assert!(plain_http_result.is_err(), "what is not encrypted gets no answer: {plain_http_result:?}");
}

/// Without the attribute `Secure`, a browser would send the cookie to any plain HTTP server of the same host name.
#[tokio::test]
async fn session_cookie_has_secure_attribute_with_tls() {
    let env = ApiTlsTestEnv::start().await;
    let viewer_credentials = env.issue_certificate(FleetRole::Viewer, "eve");
    let headers_file = env.test_directory.temporary_directory.path().join("headers");
    let curl_options = [
        "--cacert",
        path_to_str(&viewer_credentials.ca_path),
        "--cert",
        path_to_str(&viewer_credentials.certificate_path),
        "--key",
        path_to_str(&viewer_credentials.key_path),
    ];
    for method in ["POST", "DELETE"] {
        let session_options = ["--request", method, "--dump-header", path_to_str(&headers_file)];
        assert_eq!(env.request_by_curl("/v1/session", &[&curl_options[..], &session_options].concat()).await, Ok(204));
        let response_headers = std::fs::read_to_string(&headers_file).unwrap();
        let cookie = response_headers.lines().find(|line| line.starts_with("set-cookie: ")).expect("a cookie");
        assert!(cookie.split("; ").any(|attribute| attribute == "Secure"), "{method}: {cookie}");
    }
}

#[tokio::test]
async fn commands_authenticate_by_token_or_certificate() {
    let env = ApiTlsTestEnv::start().await;
    let viewer_credentials = env.issue_certificate(FleetRole::Viewer, "eve");
    let client = env.client_with_credential(ApiCredential::Certificate(viewer_credentials.clone()));
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");
    let forbidden_error = client.rotate_keys(&RotateKeys { force: true }).await.unwrap_err();
    assert_eq!(forbidden_error.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Forbidden);
    let operator_client =
        env.client_with_credential(ApiCredential::Certificate(env.issue_certificate(FleetRole::Operator, "ann")));
    operator_client.rotate_keys(&RotateKeys { force: true }).await.unwrap();

    let token_file = env.token_file_path(coreward_api::Role::Viewer);
    let client = env.client_with_credential(ApiCredential::Token {
        file: token_file.clone(),
        ca: Some(viewer_credentials.ca_path.clone()),
    });
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");

    // The peer must be a controller with a certificate of the trusted authority.
    let foreign_authority = CertificateAuthority::init(
        &env.test_directory.temporary_directory.path().join("foreign"),
        &"prod".parse().unwrap(),
        DAY,
    )
    .unwrap();
    let client = env.client_with_credential(ApiCredential::Token {
        file: token_file.clone(),
        ca: Some(foreign_authority.ca_path()),
    });
    let error = client.status(false).await.unwrap_err().to_string();
    assert!(
        error.contains("its certificate is signed by no authority in `ca`") && error.contains(&env.api_url()),
        "{error}"
    );

    for (url, credential, expected) in [
        (env.api_url(), ApiCredential::Token { file: token_file.clone(), ca: None }, "https:// and no `--ca`"),
        (
            "127.0.0.1:7401".to_owned(),
            ApiCredential::Certificate(viewer_credentials),
            "a certificate proves nothing without TLS",
        ),
    ] {
        let url: ControllerUrl = url.parse().unwrap();
        let error = ControllerClient::with_controllers(vec![url], &credential, ExpectedControllerHost::Requested)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

fn expected_hosts(names: &[&str]) -> ExpectedControllerHost {
    ExpectedControllerHost::OneOf(names.iter().map(ToString::to_string).collect())
}

/// If the controller's certificate names hosts, it must name the host of the request, or a host that the operator
/// expects.
#[tokio::test]
async fn controller_certificate_must_name_the_requested_host() {
    let env = ApiTlsTestEnv::start_with_certificate_for(&["c1.example", "192.0.2.7"]).await;
    let viewer_credentials = env.issue_certificate(FleetRole::Viewer, "eve");
    let token_credential = ApiCredential::Token {
        file: env.token_file_path(coreward_api::Role::Viewer),
        ca: Some(viewer_credentials.ca_path.clone()),
    };
    for credential in [token_credential, ApiCredential::Certificate(viewer_credentials.clone())] {
        let error_text = env.client_with_credential(credential.clone()).status(false).await.unwrap_err().to_string();
        let expected_error =
            "its certificate is for controller c1 at c1.example, 192.0.2.7: expected one for 127.0.0.1";
        assert!(error_text.contains(expected_error) && error_text.contains("--controller-name"), "{error_text}");
        for expected_name in ["c1", "c1.example", "192.0.2.7"] {
            let client =
                env.client_for_url(&env.api_url(), credential.clone(), expected_hosts(&["another", expected_name]));
            client.status(false).await.unwrap_or_else(|error| panic!("{expected_name}: {error:#}"));
        }
        let rejection = env
            .client_for_url(&env.api_url(), credential, expected_hosts(&["c2", "127.0.0.1"]))
            .status(false)
            .await
            .unwrap_err();
        let error_text = rejection.to_string();
        assert!(error_text.contains("192.0.2.7: expected one for c2 or 127.0.0.1"), "{error_text}");
    }
    env.controller.kill().await;
}

#[tokio::test]
async fn certificate_for_localhost_is_rejected_for_its_address() {
    let env = ApiTlsTestEnv::start_with_certificate_for(&["localhost"]).await;
    let credential = ApiCredential::Certificate(env.issue_certificate(FleetRole::Viewer, "eve"));
    let localhost_url = env.api_url().replace("127.0.0.1", "localhost");
    env.client_for_url(&localhost_url, credential.clone(), ExpectedControllerHost::Requested)
        .status(false)
        .await
        .unwrap();
    env.client_with_credential(credential).status(false).await.unwrap_err();
    env.controller.kill().await;
}

/// A certificate with the role of a controller suffices if it names no hosts and the operator expects none.
#[tokio::test]
async fn certificate_without_hosts_is_valid_for_the_requested_host() {
    let env = ApiTlsTestEnv::start_with_certificate_for(&[]).await;
    let credential = ApiCredential::Certificate(env.issue_certificate(FleetRole::Viewer, "eve"));
    env.client_with_credential(credential.clone()).status(false).await.unwrap();
    env.client_for_url(&env.api_url(), credential.clone(), expected_hosts(&["c1"])).status(false).await.unwrap();
    let rejection =
        env.client_for_url(&env.api_url(), credential, expected_hosts(&["127.0.0.1"])).status(false).await.unwrap_err();
    let expected_error = "its certificate is for controller c1 at no host that it names: expected one for 127.0.0.1";
    assert!(rejection.to_string().contains(expected_error), "{rejection}");
}

#[tokio::test]
async fn revoked_certificate_is_rejected() {
    let env = ApiTlsTestEnv::start().await;
    let lost_credentials = env.issue_certificate(FleetRole::Operator, "lost");
    let client = env.client_with_credential(ApiCredential::Certificate(lost_credentials.clone()));
    client.status(false).await.unwrap();
    let ApiTlsTestEnv { test_directory, authority, controller } = env;
    controller.kill().await;
    let fingerprint = coreward_tls::read_certificates(&lost_credentials.certificate_path).unwrap()[0].fingerprint;
    let config_text = std::fs::read_to_string(test_directory.config_path()).unwrap();
    std::fs::write(test_directory.config_path(), format!("revoked_certificates = [\"{fingerprint}\"]\n{config_text}"))
        .unwrap();
    let env = ApiTlsTestEnv { controller: test_directory.start_controller().await, test_directory, authority };
    let rejection_error = env
        .client_with_credential(ApiCredential::Certificate(lost_credentials))
        .status(false)
        .await
        .unwrap_err()
        .to_string();
    assert!(rejection_error.contains("revoked"), "{rejection_error}");
}

/// Without `[tls]`, a token would cross the network in cleartext.
#[tokio::test]
async fn api_on_nonlocal_address_requires_tls() {
    let test_directory = TestDirectory::new(&["s1"], WEB_SERVICE_TOML);
    let config_text = std::fs::read_to_string(test_directory.config_path()).unwrap();
    std::fs::write(test_directory.config_path(), config_text.replace("api = \"127.0.0.1:0\"", "api = \"0.0.0.0:0\""))
        .unwrap();
    let bind_error = coreward_control_server::server::ControllerServer::bind(&test_directory.config_path())
        .await
        .err()
        .expect("rejected")
        .to_string();
    assert!(bind_error.contains("tokens would pass a network in clear to 0.0.0.0:0: expected `[tls]`"), "{bind_error}");
}
