//! The HTTP API beyond its own host: TLS, with a token or with a certificate.

use std::path::{Path, PathBuf};

use coreward_api::types::RotateKeys;
use coreward_http::client::{Client, ControllerUrl, Credential};
use coreward_http::tokens::token_file;
use coreward_http::{Problem, ProblemKind};
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::verify::ExpectedHost;
use coreward_tls::{CredentialFiles, Identity, Role};

use crate::support::{RunningController, TestDirectory, with_timeout};

const SERVICE: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";

/// Controller whose API listens on all addresses with TLS, and the authority of its certificates.
struct TestEnv {
    home: TestDirectory,
    authority: Authority,
    running: RunningController,
}

impl TestEnv {
    async fn start() -> Self {
        Self::start_at(&["127.0.0.1"]).await
    }

    /// Starts a controller with a certificate for these host names and addresses.
    async fn start_at(hosts: &[&str]) -> Self {
        let home = TestDirectory::new(&["s1"], SERVICE);
        let authority =
            Authority::init(&home.directory.path().join("certs"), &"prod".parse().unwrap(), 30 * DAY).unwrap();
        let own = issue(&home, &authority, Role::Controller, "c1", hosts);
        let (ca, certificate, key) = (&own.ca, &own.certificate, &own.key);
        let tls = format!("[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n");
        home.write_controllers_file(&format!("fleet = \"fleet.toml\"\n{tls}"));
        let text = std::fs::read_to_string(home.config()).unwrap();
        std::fs::write(home.config(), text.replace("api = \"127.0.0.1:0\"", "api = \"0.0.0.0:0\"")).unwrap();
        let running = home.start().await;
        Self { home, authority, running }
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.running.api.port())
    }

    fn certificate(&self, role: Role, name: &str) -> CredentialFiles {
        issue(&self.home, &self.authority, role, name, &[])
    }

    fn token_file(&self, role: coreward_api::Role) -> PathBuf {
        token_file(self.home.directory.path(), role)
    }

    fn client(&self, proof: Credential) -> Client {
        self.client_of(&self.url(), proof, ExpectedHost::Requested)
    }

    fn client_of(&self, url: &str, proof: Credential, host: ExpectedHost) -> Client {
        Client::with_controllers(vec![url.parse().unwrap()], &proof, host).unwrap()
    }

    /// Requests the path with curl. Returns the HTTP status, or curl's error message.
    async fn curl(&self, path: &str, options: &[&str]) -> Result<u16, String> {
        let mut command = tokio::process::Command::new("curl");
        command.args(["--silent", "--show-error", "--output", "/dev/null", "--write-out", "%{http_code}"]);
        command.args(options).arg(format!("{}{path}", self.url()));
        let output = with_timeout("curl", command.output()).await.unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap().parse().unwrap()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }
}

fn issue(home: &TestDirectory, authority: &Authority, role: Role, name: &str, hosts: &[&str]) -> CredentialFiles {
    let identity = Identity { fleet: "prod".parse().unwrap(), role, name: name.parse().unwrap() };
    let directory = home.directory.path().join(format!("{role}-{name}"));
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let issued = authority.issue(&identity, &hosts, Validity::from_now(DAY)).unwrap();
    issued.write(&directory, authority).unwrap();
    let file = |name: &str| directory.join(name);
    CredentialFiles { ca: file("ca.crt"), certificate: file("own.crt"), key: file("own.key") }
}

fn path_text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// curl may authenticate by a token with TLS, or by a certificate without a token, but not without both.
#[tokio::test]
async fn curl_authenticates_by_token_or_certificate() {
    let env = TestEnv::start().await;
    let ca = env.certificate(Role::Viewer, "eve").ca;
    let trusting = ["--cacert", path_text(&ca)];
    let bearer = |role| {
        let token = std::fs::read_to_string(env.token_file(role)).unwrap();
        format!("Authorization: Bearer {}", token.trim())
    };
    let viewer = bearer(coreward_api::Role::Viewer);
    let with = |more: &[&'static str]| -> Vec<&str> { trusting.iter().chain(more).copied().collect() };
    let rotate = ["--request", "POST", "--json", "{}"];
    assert_eq!(env.curl("/v1/health", &with(&[])).await, Ok(401));
    assert_eq!(env.curl("/v1/health", &[&trusting[..], &["--header", &viewer]].concat()).await, Ok(200));
    let refused = env.curl("/v1/health", &["--header", &viewer]).await.unwrap_err();
    assert!(refused.contains("certificate"), "{refused}");
    for (role, reads, writes) in [
        (Role::Viewer, 200, 403),
        // The key is too new for a rotation.
        (Role::Operator, 200, 409),
        (Role::Agent, 401, 401),
        (Role::Lb, 401, 401),
        (Role::Rack, 401, 401),
        (Role::Controller, 401, 401),
    ] {
        let own = env.certificate(role, "somebody");
        let shows = ["--cert", path_text(&own.certificate), "--key", path_text(&own.key)];
        let asks = [&trusting[..], &shows].concat();
        assert_eq!(env.curl("/v1/status", &asks).await, Ok(reads), "{role}");
        assert_eq!(env.curl("/v1/keys/rotate", &[&asks[..], &rotate].concat()).await, Ok(writes), "{role}");
    }
    let plain = env.url().replace("https", "http");
    let plain = with_timeout("an answer", reqwest::get(format!("{plain}/v1/health"))).await;
    assert!(plain.is_err(), "what is not encrypted gets no answer: {plain:?}");
}

/// Without the attribute `Secure`, a browser would send the cookie to any plain HTTP server of the same host name.
#[tokio::test]
async fn session_cookie_of_tls_is_secure() {
    let env = TestEnv::start().await;
    let own = env.certificate(Role::Viewer, "eve");
    let headers = env.home.directory.path().join("headers");
    let asks = ["--cacert", path_text(&own.ca), "--cert", path_text(&own.certificate), "--key", path_text(&own.key)];
    for method in ["POST", "DELETE"] {
        let more = ["--request", method, "--dump-header", path_text(&headers)];
        assert_eq!(env.curl("/v1/session", &[&asks[..], &more].concat()).await, Ok(204));
        let answer = std::fs::read_to_string(&headers).unwrap();
        let cookie = answer.lines().find(|line| line.starts_with("set-cookie: ")).expect("a cookie");
        assert!(cookie.split("; ").any(|attribute| attribute == "Secure"), "{method}: {cookie}");
    }
}

#[tokio::test]
async fn commands_authenticate_by_token_or_certificate() {
    let env = TestEnv::start().await;
    let viewer = env.certificate(Role::Viewer, "eve");
    let client = env.client(Credential::Certificate(viewer.clone()));
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");
    let forbidden = client.rotate_keys(&RotateKeys { force: true }).await.unwrap_err();
    assert_eq!(forbidden.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Forbidden);
    let operator = env.client(Credential::Certificate(env.certificate(Role::Operator, "ann")));
    operator.rotate_keys(&RotateKeys { force: true }).await.unwrap();

    let file = env.token_file(coreward_api::Role::Viewer);
    let client = env.client(Credential::Token { file: file.clone(), ca: Some(viewer.ca.clone()) });
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");

    // The peer must be a controller with a certificate of our authority.
    let foreign = Authority::init(&env.home.directory.path().join("foreign"), &"prod".parse().unwrap(), DAY).unwrap();
    let client = env.client(Credential::Token { file: file.clone(), ca: Some(foreign.ca_path()) });
    let error = client.status(false).await.unwrap_err().to_string();
    assert!(
        error.contains("its certificate is signed by no authority in `ca`") && error.contains(&env.url()),
        "{error}"
    );

    for (url, proof, expected) in [
        (env.url(), Credential::Token { file: file.clone(), ca: None }, "https:// and no `--ca`"),
        ("127.0.0.1:7401".to_owned(), Credential::Certificate(viewer), "a certificate proves nothing without TLS"),
    ] {
        let url: ControllerUrl = url.parse().unwrap();
        let error = Client::with_controllers(vec![url], &proof, ExpectedHost::Requested).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// If the controller's certificate names hosts, it must name the host of the request, or a host that the operator
/// expects. Otherwise a certificate with the role of a controller suffices.
#[tokio::test]
async fn controller_certificate_must_name_the_requested_host() {
    let one_of = |names: &[&str]| ExpectedHost::OneOf(names.iter().map(ToString::to_string).collect());
    let env = TestEnv::start_at(&["c1.example", "192.0.2.7"]).await;
    let viewer = env.certificate(Role::Viewer, "eve");
    let token = Credential::Token { file: env.token_file(coreward_api::Role::Viewer), ca: Some(viewer.ca.clone()) };
    for proof in [token, Credential::Certificate(viewer.clone())] {
        let refused = env.client(proof.clone()).status(false).await.unwrap_err().to_string();
        let expected = "its certificate is for controller c1 at c1.example, 192.0.2.7: expected one for 127.0.0.1";
        assert!(refused.contains(expected) && refused.contains("--controller-name"), "{refused}");
        for named in ["c1", "c1.example", "192.0.2.7"] {
            let client = env.client_of(&env.url(), proof.clone(), one_of(&["another", named]));
            client.status(false).await.unwrap_or_else(|error| panic!("{named}: {error:#}"));
        }
        let refused = env.client_of(&env.url(), proof, one_of(&["c2", "127.0.0.1"])).status(false).await.unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("192.0.2.7: expected one for c2 or 127.0.0.1"), "{refused}");
    }
    env.running.kill().await;

    let env = TestEnv::start_at(&["localhost"]).await;
    let proof = Credential::Certificate(env.certificate(Role::Viewer, "eve"));
    let by_name = env.url().replace("127.0.0.1", "localhost");
    env.client_of(&by_name, proof.clone(), ExpectedHost::Requested).status(false).await.unwrap();
    env.client(proof).status(false).await.unwrap_err();
    env.running.kill().await;

    let env = TestEnv::start_at(&[]).await;
    let proof = Credential::Certificate(env.certificate(Role::Viewer, "eve"));
    env.client(proof.clone()).status(false).await.unwrap();
    env.client_of(&env.url(), proof.clone(), one_of(&["c1"])).status(false).await.unwrap();
    let refused = env.client_of(&env.url(), proof, one_of(&["127.0.0.1"])).status(false).await.unwrap_err();
    let expected = "its certificate is for controller c1 at no host that it names: expected one for 127.0.0.1";
    assert!(refused.to_string().contains(expected), "{refused}");
}

#[tokio::test]
async fn revoked_certificate_is_rejected() {
    let env = TestEnv::start().await;
    let lost = env.certificate(Role::Operator, "lost");
    let client = env.client(Credential::Certificate(lost.clone()));
    client.status(false).await.unwrap();
    let TestEnv { home, authority, running } = env;
    running.kill().await;
    let fingerprint = coreward_tls::read_certificates(&lost.certificate).unwrap()[0].fingerprint;
    let text = std::fs::read_to_string(home.config()).unwrap();
    std::fs::write(home.config(), format!("revoked_certificates = [\"{fingerprint}\"]\n{text}")).unwrap();
    let env = TestEnv { running: home.start().await, home, authority };
    let error = env.client(Credential::Certificate(lost)).status(false).await.unwrap_err().to_string();
    assert!(error.contains("revoked"), "{error}");
}

/// Without `[tls]`, a token would cross the network in cleartext.
#[tokio::test]
async fn api_beyond_its_host_requires_tls() {
    let home = TestDirectory::new(&["s1"], SERVICE);
    let text = std::fs::read_to_string(home.config()).unwrap();
    std::fs::write(home.config(), text.replace("api = \"127.0.0.1:0\"", "api = \"0.0.0.0:0\"")).unwrap();
    let error = coreward_control_server::server::ControllerServer::bind(&home.config())
        .await
        .err()
        .expect("refused")
        .to_string();
    assert!(error.contains("tokens would pass a network in clear to 0.0.0.0:0: expected `[tls]`"), "{error}");
}
