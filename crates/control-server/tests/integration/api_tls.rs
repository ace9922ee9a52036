//! The HTTP API beyond its own host: TLS, with a token or with a certificate.

use std::path::{Path, PathBuf};

use coreward_api::types::RotateKeys;
use coreward_http::client::{Client, ControllerUrl, Proof};
use coreward_http::tokens::token_file;
use coreward_http::{Problem, ProblemKind};
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::verify::Host;
use coreward_tls::{Files, Identity, Role};

use crate::support::{Home, Running, in_time};

const SERVICE: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";

/// A controller whose API listens everywhere, and certificates of its authority.
struct TestEnv {
    home: Home,
    authority: Authority,
    running: Running,
}

impl TestEnv {
    async fn start() -> Self {
        Self::start_at(&["127.0.0.1"]).await
    }

    /// The controller's certificate names these hosts.
    async fn start_at(hosts: &[&str]) -> Self {
        let home = Home::new(&["s1"], SERVICE);
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

    fn certificate(&self, role: Role, name: &str) -> Files {
        issue(&self.home, &self.authority, role, name, &[])
    }

    fn token_file(&self, role: coreward_api::Role) -> PathBuf {
        token_file(self.home.directory.path(), role)
    }

    fn client(&self, proof: Proof) -> Client {
        self.client_of(&self.url(), proof, Host::AskedFor)
    }

    fn client_of(&self, url: &str, proof: Proof, host: Host) -> Client {
        Client::with_controllers(vec![url.parse().unwrap()], &proof, host).unwrap()
    }

    /// The status of curl's answer, or why there is none.
    async fn curl(&self, path: &str, options: &[&str]) -> Result<u16, String> {
        let mut command = tokio::process::Command::new("curl");
        command.args(["--silent", "--show-error", "--output", "/dev/null", "--write-out", "%{http_code}"]);
        command.args(options).arg(format!("{}{path}", self.url()));
        let output = in_time("curl", command.output()).await.unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap().parse().unwrap()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }
}

fn issue(home: &Home, authority: &Authority, role: Role, name: &str, hosts: &[&str]) -> Files {
    let identity = Identity { fleet: "prod".parse().unwrap(), role, name: name.parse().unwrap() };
    let directory = home.directory.path().join(format!("{role}-{name}"));
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let issued = authority.issue(&identity, &hosts, Validity::from_now(DAY)).unwrap();
    issued.write(&directory, authority).unwrap();
    let file = |name: &str| directory.join(name);
    Files { ca: file("ca.crt"), certificate: file("own.crt"), key: file("own.key") }
}

fn shown(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Stock programs: a token by TLS, a certificate in its place, and neither.
#[tokio::test]
async fn curl_authenticates_by_token_or_certificate() {
    let site = TestEnv::start().await;
    let ca = site.certificate(Role::Viewer, "eve").ca;
    let trusting = ["--cacert", shown(&ca)];
    let bearer = |role| {
        let token = std::fs::read_to_string(site.token_file(role)).unwrap();
        format!("Authorization: Bearer {}", token.trim())
    };
    let viewer = bearer(coreward_api::Role::Viewer);
    let with = |more: &[&'static str]| -> Vec<&str> { trusting.iter().chain(more).copied().collect() };
    let rotate = ["--request", "POST", "--json", "{}"];
    assert_eq!(site.curl("/v1/health", &with(&[])).await, Ok(401));
    assert_eq!(site.curl("/v1/health", &[&trusting[..], &["--header", &viewer]].concat()).await, Ok(200));
    let refused = site.curl("/v1/health", &["--header", &viewer]).await.unwrap_err();
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
        let own = site.certificate(role, "somebody");
        let shows = ["--cert", shown(&own.certificate), "--key", shown(&own.key)];
        let asks = [&trusting[..], &shows].concat();
        assert_eq!(site.curl("/v1/status", &asks).await, Ok(reads), "{role}");
        assert_eq!(site.curl("/v1/keys/rotate", &[&asks[..], &rotate].concat()).await, Ok(writes), "{role}");
    }
    let plain = site.url().replace("https", "http");
    let plain = in_time("an answer", reqwest::get(format!("{plain}/v1/health"))).await;
    assert!(plain.is_err(), "what is not encrypted gets no answer: {plain:?}");
}

/// Otherwise a browser would send it to any plain HTTP server of the same host name.
#[tokio::test]
async fn session_cookie_of_tls_is_secure() {
    let site = TestEnv::start().await;
    let own = site.certificate(Role::Viewer, "eve");
    let headers = site.home.directory.path().join("headers");
    let asks = ["--cacert", shown(&own.ca), "--cert", shown(&own.certificate), "--key", shown(&own.key)];
    for method in ["POST", "DELETE"] {
        let more = ["--request", method, "--dump-header", shown(&headers)];
        assert_eq!(site.curl("/v1/session", &[&asks[..], &more].concat()).await, Ok(204));
        let answer = std::fs::read_to_string(&headers).unwrap();
        let cookie = answer.lines().find(|line| line.starts_with("set-cookie: ")).expect("a cookie");
        assert!(cookie.split("; ").any(|attribute| attribute == "Secure"), "{method}: {cookie}");
    }
}

#[tokio::test]
async fn commands_authenticate_by_token_or_certificate() {
    let site = TestEnv::start().await;
    let viewer = site.certificate(Role::Viewer, "eve");
    let client = site.client(Proof::Certificate(viewer.clone()));
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");
    let forbidden = client.rotate_keys(&RotateKeys { force: true }).await.unwrap_err();
    assert_eq!(forbidden.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Forbidden);
    let operator = site.client(Proof::Certificate(site.certificate(Role::Operator, "ann")));
    operator.rotate_keys(&RotateKeys { force: true }).await.unwrap();

    let file = site.token_file(coreward_api::Role::Viewer);
    let client = site.client(Proof::Token { file: file.clone(), ca: Some(viewer.ca.clone()) });
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");

    // The peer must be a controller with a certificate of our authority.
    let foreign = Authority::init(&site.home.directory.path().join("foreign"), &"prod".parse().unwrap(), DAY).unwrap();
    let client = site.client(Proof::Token { file: file.clone(), ca: Some(foreign.ca()) });
    let error = client.status(false).await.unwrap_err().to_string();
    assert!(
        error.contains("its certificate is signed by no authority in `ca`") && error.contains(&site.url()),
        "{error}"
    );

    for (url, proof, expected) in [
        (site.url(), Proof::Token { file: file.clone(), ca: None }, "https:// and no `--ca`"),
        ("127.0.0.1:7401".to_owned(), Proof::Certificate(viewer), "a certificate proves nothing without TLS"),
    ] {
        let url: ControllerUrl = url.parse().unwrap();
        let error = Client::with_controllers(vec![url], &proof, Host::AskedFor).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// If the certificate names hosts, the host of the command must be one of them, or the operator's name for it;
/// otherwise the role suffices.
#[tokio::test]
async fn controller_certificate_must_name_the_requested_host() {
    let one_of = |names: &[&str]| Host::OneOf(names.iter().map(ToString::to_string).collect());
    let site = TestEnv::start_at(&["c1.example", "192.0.2.7"]).await;
    let viewer = site.certificate(Role::Viewer, "eve");
    let token = Proof::Token { file: site.token_file(coreward_api::Role::Viewer), ca: Some(viewer.ca.clone()) };
    for proof in [token, Proof::Certificate(viewer.clone())] {
        let refused = site.client(proof.clone()).status(false).await.unwrap_err().to_string();
        let expected = "its certificate is for controller c1 at c1.example, 192.0.2.7: expected one for 127.0.0.1";
        assert!(refused.contains(expected) && refused.contains("--controller-name"), "{refused}");
        for named in ["c1", "c1.example", "192.0.2.7"] {
            let client = site.client_of(&site.url(), proof.clone(), one_of(&["another", named]));
            client.status(false).await.unwrap_or_else(|error| panic!("{named}: {error:#}"));
        }
        let refused = site.client_of(&site.url(), proof, one_of(&["c2", "127.0.0.1"])).status(false).await.unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("192.0.2.7: expected one for c2 or 127.0.0.1"), "{refused}");
    }
    site.running.kill().await;

    let site = TestEnv::start_at(&["localhost"]).await;
    let proof = Proof::Certificate(site.certificate(Role::Viewer, "eve"));
    let by_name = site.url().replace("127.0.0.1", "localhost");
    site.client_of(&by_name, proof.clone(), Host::AskedFor).status(false).await.unwrap();
    site.client(proof).status(false).await.unwrap_err();
    site.running.kill().await;

    let site = TestEnv::start_at(&[]).await;
    let proof = Proof::Certificate(site.certificate(Role::Viewer, "eve"));
    site.client(proof.clone()).status(false).await.unwrap();
    site.client_of(&site.url(), proof.clone(), one_of(&["c1"])).status(false).await.unwrap();
    let refused = site.client_of(&site.url(), proof, one_of(&["127.0.0.1"])).status(false).await.unwrap_err();
    let expected = "its certificate is for controller c1 at no host that it names: expected one for 127.0.0.1";
    assert!(refused.to_string().contains(expected), "{refused}");
}

#[tokio::test]
async fn revoked_certificate_is_rejected() {
    let site = TestEnv::start().await;
    let lost = site.certificate(Role::Operator, "lost");
    let client = site.client(Proof::Certificate(lost.clone()));
    client.status(false).await.unwrap();
    let TestEnv { home, authority, running } = site;
    running.kill().await;
    let fingerprint = coreward_tls::read_certificates(&lost.certificate).unwrap()[0].fingerprint;
    let text = std::fs::read_to_string(home.config()).unwrap();
    std::fs::write(home.config(), format!("revoked_certificates = [\"{fingerprint}\"]\n{text}")).unwrap();
    let site = TestEnv { running: home.start().await, home, authority };
    let error = site.client(Proof::Certificate(lost)).status(false).await.unwrap_err().to_string();
    assert!(error.contains("revoked"), "{error}");
}

/// Without `[tls]` a token would pass the network in clear.
#[tokio::test]
async fn api_beyond_its_host_requires_tls() {
    let home = Home::new(&["s1"], SERVICE);
    let text = std::fs::read_to_string(home.config()).unwrap();
    std::fs::write(home.config(), text.replace("api = \"127.0.0.1:0\"", "api = \"0.0.0.0:0\"")).unwrap();
    let error = coreward_control_server::server::Server::bind(&home.config()).await.err().expect("refused").to_string();
    assert!(error.contains("tokens would pass a network in clear to 0.0.0.0:0: expected `[tls]`"), "{error}");
}
