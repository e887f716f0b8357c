//! A directory of manifests in the states that editors, package managers and mistakes produce.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use notify::EventKind;
use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use tempfile::TempDir;

use super::catalogue::Contents;
use super::tree::{Read, read_file};
use super::watcher::signal_of;
use super::*;
use crate::file_version::FileVersion;
use crate::objects::ObjectName;
use crate::objects::Origin;
use crate::objects::policy::Directions;

const DEADLINE: Duration = Duration::from_secs(20);

fn timing() -> Timing {
    Timing {
        quiet: Duration::from_millis(5),
        renamed: Duration::from_millis(1),
        patience: Duration::from_millis(200),
        retry: Duration::from_millis(10),
        trust: Duration::from_secs(3600),
    }
}

fn pod(name: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{version: one}}}}\n")
}

fn policy(name: &str) -> String {
    format!(
        "apiVersion: k8s.cni.cncf.io/v1beta1\nkind: MultiNetworkPolicy\nmetadata:\n  name: {name}\n  annotations: \
         {{k8s.v1.cni.cncf.io/policy-for: net-a}}\nspec:\n  podSelector: {{}}\n  policyTypes: [Ingress]\n"
    )
}

fn write(directory: &Path, file: &str, text: &str) {
    fs::write(directory.join(file), text).unwrap();
}

fn tree(directory: &Path) -> Tree {
    let mut tree = Tree::new(directory.to_owned());
    tree.read(&Touched::Anything).unwrap();
    tree
}

fn pods(objects: &Objects) -> Vec<&str> {
    objects.pods.keys().map(|name| name.name.as_str()).collect()
}

fn policies(objects: &Objects) -> Vec<&str> {
    objects.policies.keys().map(|name| name.name.as_str()).collect()
}

/// The problems, with paths relative to the directory.
fn problems(directory: &Path, objects: &Objects) -> Vec<(String, Option<usize>, String)> {
    let relative = |path: &Path| path.strip_prefix(directory).unwrap().display().to_string();
    let place = |origin: &Origin| match origin {
        Origin::File { path, document } => (relative(path), *document),
        other => panic!("{other} is no file"),
    };
    let problems = objects.problems.iter().map(|problem| (place(&problem.origin), problem.message.clone()));
    problems.map(|((file, document), message)| (file, document, message)).collect()
}

#[test]
fn manifests_of_all_suffixes_are_read_recursively() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    fs::create_dir_all(path.join("deep/er")).unwrap();
    fs::create_dir(path.join("..data")).unwrap();
    write(path, "a.yaml", &format!("{}---\n{}", pod("one"), pod("two")));
    write(path, "b.yml", &pod("three"));
    write(path, "deep/er/c.json", r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"four"}}"#);
    write(path, "notes.txt", &pod("ignored"));
    write(path, ".a.yaml.swp", &pod("ignored"));
    write(path, ".hidden.yaml", &pod("ignored"));
    write(path, "..data/a.yaml", &pod("ignored"));
    std::os::unix::fs::symlink("../b.yml", path.join("deep/same.yaml")).unwrap();
    std::os::unix::fs::symlink("..", path.join("deep/loop.yaml")).unwrap();
    let objects = tree(path).objects();
    assert_eq!(pods(&objects), ["four", "one", "three", "two"]);
    let twice = format!("pod default/three is in {} already", path.join("b.yml").display());
    assert_eq!(problems(path, &objects), [("deep/same.yaml".to_owned(), Some(0), twice)]);
}

#[test]
fn of_two_objects_with_one_name_the_first_file_counts() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(path, "b.yaml", &pod("one").replace("version: one", "version: two"));
    write(path, "a.yaml", &pod("one"));
    let objects = tree(path).objects();
    assert_eq!(objects.pods[&ObjectName::new("default", "one")].labels["version"], "one");
    let already = format!("pod default/one is in {} already", path.join("a.yaml").display());
    assert_eq!(problems(path, &objects), [("b.yaml".to_owned(), Some(0), already)]);
}

#[test]
fn a_bad_document_leaves_its_neighbours_readable() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(path, "a.yaml", &format!("{}---\nkind: [\n---\n{}---\nkind: Pod\n", pod("one"), pod("two")));
    let objects = tree(path).objects();
    assert_eq!(pods(&objects), ["one", "two"]);
    let found: Vec<_> = problems(path, &objects).into_iter().map(|(file, index, _)| (file, index)).collect();
    assert_eq!(found, [("a.yaml".to_owned(), Some(1)), ("a.yaml".to_owned(), Some(3))]);
}

#[test]
fn while_a_document_fails_what_the_file_gave_before_is_kept() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let whole = format!("{}---\n{}", pod("one"), policy("deny"));
    write(path, "a.yaml", &whole);
    let mut tree = tree(path);
    let before = tree.objects();
    // Truncated at every byte: the policy is either unchanged or, if the text still parses, as the text says.
    for length in 0..whole.len() {
        write(path, "a.yaml", &whole[..length]);
        tree.read(&Touched::Anything).unwrap();
        let objects = tree.objects();
        if !objects.problems.is_empty() {
            assert_eq!(objects.policies, before.policies, "torn at byte {length}");
        }
        write(path, "a.yaml", &whole);
        tree.read(&Touched::Anything).unwrap();
        assert_eq!(tree.objects(), before, "whole again after byte {length}");
    }
    // A change of another document counts at once, even while the policy is broken.
    write(path, "a.yaml", &format!("{}---\nkind: [\n", pod("one").replace("version: one", "version: two")));
    tree.read(&Touched::Anything).unwrap();
    let objects = tree.objects();
    assert_eq!(objects.pods[&ObjectName::new("default", "one")].labels["version"], "two");
    assert_eq!(policies(&objects), ["deny"]);
    // Once the file is complete, objects missing from it are gone.
    write(path, "a.yaml", &pod("one"));
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(*tree.objects().policies, BTreeMap::new());
}

#[test]
fn an_emptied_file_keeps_its_objects_and_a_removed_one_does_not() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(path, "a.yaml", &policy("deny"));
    write(path, "empty.yaml", "");
    let mut tree = tree(path);
    assert_eq!(tree.objects().problems, []);
    write(path, "a.yaml", "");
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(policies(&tree.objects()), ["deny"]);
    assert_eq!(
        problems(path, &tree.objects()),
        [("a.yaml".to_owned(), None, "is empty; remove it to remove its objects".to_owned())]
    );
    write(path, "a.yaml", "# nothing any more\n");
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(tree.objects(), Objects::default());
    write(path, "a.yaml", &policy("deny"));
    tree.read(&Touched::Anything).unwrap();
    fs::remove_file(path.join("a.yaml")).unwrap();
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(tree.objects(), Objects::default());
}

#[test]
fn text_that_is_not_utf8_is_a_problem_of_its_file() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    fs::write(path.join("a.yaml"), b"\xff\xfe").unwrap();
    write(path, "b.yaml", &pod("one"));
    let objects = tree(path).objects();
    assert_eq!(pods(&objects), ["one"]);
    assert_eq!(problems(path, &objects).len(), 1);
}

#[test]
fn a_missing_directory_is_refused_at_start() {
    let directory = TempDir::new().unwrap();
    let missing = directory.path().join("missing");
    let error = Files::open(&missing, timing()).unwrap_err();
    assert_eq!(error.to_string(), format!("watch manifest directory {}", missing.display()));
}

/// Waits until the newest snapshot meets a condition.
async fn until(files: &Files, wanted: impl Fn(&Objects) -> bool) -> Arc<Objects> {
    let mut changes = files.changes();
    let waited = tokio::time::timeout(DEADLINE, async {
        loop {
            changes.borrow_and_update();
            let snapshot = files.snapshot();
            if wanted(&snapshot) {
                return snapshot;
            }
            changes.changed().await.unwrap();
        }
    });
    waited.await.unwrap_or_else(|_| panic!("still {:?}", files.snapshot()))
}

#[tokio::test]
async fn changes_are_seen_however_an_editor_makes_them() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(path, "a.yaml", &pod("one"));
    let files = Files::open(path, timing()).unwrap();
    assert_eq!(pods(&files.snapshot()), ["one"]);
    assert_eq!(*files.changes().borrow(), 0);

    write(path, "a.yaml", &pod("two"));
    until(&files, |objects| pods(objects) == ["two"]).await;
    write(path, ".a.yaml.tmp", &pod("three"));
    fs::rename(path.join(".a.yaml.tmp"), path.join("a.yaml")).unwrap();
    until(&files, |objects| pods(objects) == ["three"]).await;
    fs::create_dir(path.join("sub")).unwrap();
    write(path, "sub/b.yaml", &pod("four"));
    until(&files, |objects| pods(objects) == ["four", "three"]).await;
    write(path, "sub/b.yaml", &pod("five"));
    until(&files, |objects| pods(objects) == ["five", "three"]).await;
    fs::remove_dir_all(path.join("sub")).unwrap();
    until(&files, |objects| pods(objects) == ["three"]).await;
}

#[tokio::test]
async fn a_mounted_config_map_is_followed_when_its_link_is_swapped() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("mount");
    for (version, name) in [("..one", "first"), ("..two", "second")] {
        fs::create_dir_all(path.join(version)).unwrap();
        write(&path.join(version), "a.yaml", &pod(name));
    }
    std::os::unix::fs::symlink("..one", path.join("..data")).unwrap();
    std::os::unix::fs::symlink("..data/a.yaml", path.join("a.yaml")).unwrap();
    // The source's path may itself be a link.
    let link = parent.path().join("link");
    std::os::unix::fs::symlink("mount", &link).unwrap();
    let files = Files::open(&link, timing()).unwrap();
    assert_eq!(pods(&files.snapshot()), ["first"]);

    std::os::unix::fs::symlink("..two", path.join("..data_tmp")).unwrap();
    fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
    until(&files, |objects| pods(objects) == ["second"]).await;
}

#[tokio::test]
async fn a_directory_that_vanishes_keeps_its_objects_until_it_is_back() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("manifests");
    fs::create_dir(&path).unwrap();
    write(&path, "a.yaml", &policy("deny"));
    let files = Files::open(&path, timing()).unwrap();

    fs::rename(&path, parent.path().join("away")).unwrap();
    let away = until(&files, |objects| !objects.problems.is_empty()).await;
    assert_eq!(policies(&away), ["deny"]);
    fs::create_dir(&path).unwrap();
    write(&path, "b.yaml", &policy("other"));
    until(&files, |objects| policies(objects) == ["other"] && objects.problems.is_empty()).await;
    write(&path, "b.yaml", &policy("third"));
    until(&files, |objects| policies(objects) == ["third"]).await;

    fs::remove_dir_all(&path).unwrap();
    until(&files, |objects| !objects.problems.is_empty()).await;
}

#[test]
fn reading_the_directory_does_not_count_as_a_change() {
    use notify::event::{CreateKind, RemoveKind};
    let renamed = |mode| EventKind::Modify(ModifyKind::Name(mode));
    let names = |names: &[&str]| Touched::Names(names.iter().map(PathBuf::from).collect());
    let changed = |name: &str| Some(Signal::Changed(names(&[name])));
    let whole = |name: &str| Some(Signal::Renamed(names(&[name])));
    let table = [
        (EventKind::Access(AccessKind::Open(AccessMode::Any)), "a.yaml", None),
        (EventKind::Access(AccessKind::Close(AccessMode::Read)), "a.yaml", None),
        (EventKind::Access(AccessKind::Close(AccessMode::Write)), "a.yaml", changed("a.yaml")),
        (EventKind::Create(CreateKind::File), "b/a.yaml", changed("b/a.yaml")),
        (EventKind::Modify(ModifyKind::Any), "a.yaml", changed("a.yaml")),
        (EventKind::Remove(RemoveKind::Folder), "a", changed("a")),
        (renamed(RenameMode::To), "a.yaml", whole("a.yaml")),
        (renamed(RenameMode::From), ".a.yaml.tmp", whole(".a.yaml.tmp")),
        (renamed(RenameMode::From), "a.yaml", changed("a.yaml")),
        // Events of the directory itself.
        (EventKind::Remove(RemoveKind::Folder), "", Some(Signal::Changed(Touched::Anything))),
    ];
    let root = Path::new("/manifests");
    for (kind, path, expected) in table {
        let event = notify::Event::new(kind).add_path(root.join(path));
        assert_eq!(signal_of(&event, root), expected, "{kind:?} {path}");
    }
    let both =
        notify::Event::new(renamed(RenameMode::Both)).add_path(root.join("x")).add_path(root.join("y"));
    assert_eq!(signal_of(&both, root), Some(Signal::Renamed(names(&["x", "y"]))));
    // The kernel's queue overflowed.
    let missed = notify::Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
    assert_eq!(signal_of(&missed, root), Some(Signal::Changed(Touched::Anything)));
}

/// Readers find changes by comparing addresses, so equal values must stay in place; and a file that was read less than
/// a moment after it changed is read again, as it may have changed within that moment.
#[test]
fn what_did_not_change_is_the_same_value() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(path, "a.yaml", &format!("{}---\n{}", pod("one"), pod("two")));
    write(path, "b.yaml", &policy("deny"));
    let mut tree = tree(path);
    let before = tree.objects();
    write(
        path,
        "a.yaml",
        &format!("{}---\n{}", pod("one"), pod("two").replace("version: one", "version: 2x")),
    );
    tree.read(&Touched::Anything).unwrap();
    let after = tree.objects();
    let same = |name: &str| {
        let name = ObjectName::new("default", name);
        Arc::ptr_eq(&before.pods[&name], &after.pods[&name])
    };
    assert_eq!((same("one"), same("two")), (true, false));
    let deny = ObjectName::new("default", "deny");
    assert!(Arc::ptr_eq(&before.policies[&deny], &after.policies[&deny]));
    assert!(tree.files().values().all(|contents| contents.version.is_none()), "nothing has settled yet");
}

#[test]
fn a_settled_file_is_not_read_again() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("a.yaml");
    fs::write(&path, pod("one")).unwrap();
    let version = FileVersion::of(&fs::metadata(&path).unwrap());
    let known =
        || Contents { version: Some(FileVersion::of(&fs::metadata(&path).unwrap())), ..Contents::default() };
    let read = |before: &Contents| match read_file(&path, Some(before)) {
        Read::Now(contents) => Some(contents.objects.len()),
        Read::AsItWas | Read::Gone => None,
    };
    assert_eq!(read(&known()), None, "taken as it is known");
    let now = SystemTime::now();
    assert!(!version.is_settled(now) && version.is_settled(now + Duration::from_secs(10)));
    let before = known();
    fs::write(directory.path().join("next"), pod("two")).unwrap();
    fs::rename(directory.path().join("next"), &path).unwrap();
    assert_eq!(read(&before), Some(1), "another file");
}

#[test]
fn a_policy_that_cannot_be_read_isolates_unless_an_earlier_one_is_known() {
    let directory = TempDir::new().unwrap();
    let broken = policy("a").replace("podSelector: {}", "podSelector: 7");
    write(directory.path(), "a.yaml", &format!("{broken}---\n{}", pod("x")));
    let mut tree = tree(directory.path());
    let known = |tree: &Tree| {
        let objects = tree.objects();
        let policy = objects.policies[&ObjectName::new("default", "a")].clone();
        let problems: Vec<String> = policy.problems.iter().map(ToString::to_string).collect();
        (policy.networks.len(), policy.directions, problems, objects.problems.len(), pods(&objects).len())
    };
    let both = Directions::Listed { ingress: true, egress: true };
    let isolating =
        (1, both, vec!["spec: cannot be read: every pod of the namespace is isolated".to_owned()], 1, 1);
    assert_eq!(known(&tree), isolating);
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(known(&tree), isolating);
    let ingress = Directions::Listed { ingress: true, egress: false };
    let readable = |problems| (1, ingress, vec![], problems, 1);
    write(directory.path(), "a.yaml", &format!("{}---\n{}", policy("a"), pod("x")));
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(known(&tree), readable(0));
    write(directory.path(), "a.yaml", &format!("{broken}---\n{}", pod("x")));
    tree.read(&Touched::Anything).unwrap();
    assert_eq!(known(&tree), readable(1), "what it was stays");
}

fn wanted(name: &str, uid: Option<&str>) -> WantedPod {
    WantedPod { name: ObjectName::new("default", name), uid: uid.map(str::to_owned) }
}

#[tokio::test]
async fn a_pod_that_is_not_there_yet_is_waited_for_until_the_deadline() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    write(path, "known.yaml", &pod("known"));
    let files = Files::open(path, timing()).unwrap();
    let in_time = || Instant::now() + DEADLINE;
    // At once, regardless of the deadline.
    let known = files.pod(&wanted("known", None), Instant::now()).await.unwrap();
    assert!(Arc::ptr_eq(&known, &files.snapshot().pods[&known.name]));
    let late = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        write(path, "late.yaml", &pod("late"));
    };
    let late_pod = wanted("late", None);
    let (found, ()) = tokio::join!(files.pod(&late_pod, in_time()), late);
    assert_eq!(found.unwrap().labels["version"], "one");
    let began = Instant::now();
    let patience = Duration::from_millis(150);
    assert_eq!(files.pod(&wanted("never", None), began + patience).await, None);
    assert!((patience..DEADLINE).contains(&began.elapsed()), "{:?}", began.elapsed());
    // A pod of the same name may be the previous one.
    let of_uid = |uid: &str| pod("again").replace("name: again", &format!("name: again, uid: {uid}"));
    write(path, "again.yaml", &of_uid("old"));
    let (old, new) = (wanted("again", Some("old")), wanted("again", Some("new")));
    assert_eq!(files.pod(&old, in_time()).await.unwrap().uid.as_deref(), Some("old"));
    assert_eq!(files.pod(&new, Instant::now() + patience).await, None);
    write(path, "again.yaml", &of_uid("new"));
    assert_eq!(files.pod(&new, in_time()).await.unwrap().uid.as_deref(), Some("new"));
    // The runtime names a static pod by the hash of its manifest, the API its mirror by a uid of its own.
    let mirror = "{name: mirror, uid: api, annotations: {kubernetes.io/config.mirror: hash}}";
    write(path, "mirror.yaml", &format!("{{apiVersion: v1, kind: Pod, metadata: {mirror}}}"));
    for uid in ["hash", "api"] {
        let found = files.pod(&wanted("mirror", Some(uid)), in_time()).await.unwrap();
        assert_eq!(found.uid.as_deref(), Some("api"));
    }
    assert_eq!(files.pod(&wanted("mirror", Some("former")), Instant::now() + patience).await, None);
    assert_eq!(files.synced(), Ok(()));
}
