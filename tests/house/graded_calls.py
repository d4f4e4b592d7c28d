"""Mistakes of somebody new in calls, files, costs and searches."""

from tests.house.graded_row import Row


CALLS = [
    Row(
        "sfx.filter_jit(step, plan)",
        "filter_jit",
        "in_shardings=",
        "sfx.filter_jit(step, in_shardings=(plan, None))(model, x)",
    ),
    Row(
        "sfx.filter_jit(step, in_shardings=mesh)(model, x)",
        "Mesh",
        "NamedSharding(plan.jax_mesh, spec)",
        "sfx.filter_jit(step, in_shardings=NamedSharding(plan.jax_mesh, P()))(model, x)",
    ),
    Row(
        "sfx.filter_jit(step, donate=('params',))(model, x)",
        "'params'",
        "model, x",
        "sfx.filter_jit(step, donate='none')(model, x)",
    ),
    Row(
        "sfx.filter_jit(step, in_shardings={'params': plan})(model, x)",
        "params",
        "in_shardings={'model': plan}",
        "sfx.filter_jit(step, in_shardings={'model': plan})(model, x)",
    ),
    Row("sfx.shard(model)", "'plan'", "shard(tree, plan)", "sfx.shard(model, plan)"),
    Row(
        "sfx.shard(model, P('data'))",
        "not P",
        "plan(tree, mesh",
        "sfx.shard(model, plan)",
    ),
    Row(
        "sfx.shard(model, plan.shardings)",
        "dict",
        "shard(tree, plan)",
        "sfx.shard(model, plan)",
    ),
    Row(
        "sfx.constrain(x, P('data'))",
        "'plan'",
        "constrain(x, names_or_spec, plan)",
        "sfx.constrain(x, P('data'), plan)",
    ),
    Row(
        "sfx.constrain(x, P('data'), mesh)",
        "Mesh",
        "plan(tree, mesh",
        "sfx.constrain(x, P('data'), plan)",
    ),
    Row(
        "sfx.constrain(x, P('model'), plan)",
        "'model'",
        "Use one of its axes",
        "sfx.constrain(x, P('tensor'), plan)",
    ),
    Row(
        "jax.device_put(model, off.shardings)",
        "shardings",
        "plan.on(",
        "jax.device_put(model, off.on(mesh).shardings)",
    ),
    Row("sfx.gather(model, plan)", "gather", "gather(tree)", "sfx.gather(model)"),
    Row(
        "sfx.reshard(model)",
        "'dst'",
        "reshard(tree, dst)",
        "sfx.reshard(sfx.shard(model, plan), plan)",
    ),
    Row(
        "sfx.reshard(model, P('data'))",
        "P('data'",
        "NamedSharding(mesh, spec)",
        "sfx.reshard(model, NamedSharding(mesh, P('data')))",
    ),
    Row(
        "sfx.reshard(sfx.shard(model, plan), plan, memory_limit_bytes='1GB')",
        "1GB",
        "memory_limit_bytes=1 << 30",
        "sfx.reshard(sfx.shard(model, plan), plan, memory_limit_bytes=2**30)",
    ),
    Row(
        "jax.shard_map(lambda x: x, mesh=spec, in_specs=P(), out_specs=P())(x)",
        "MeshSpec",
        "spec.build(jax.devices())",
        "jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P())(x)",
    ),
    Row(
        "sfx.reshard(sfx.shard(model, plan), plan, dst=plan)",
        "'dst'",
        "reshard(tree, dst)",
        "sfx.reshard(sfx.shard(model, plan), plan)",
    ),
]

FILES = [
    Row(
        "checkpoint.save(model)",
        "'tree'",
        "save(path, tree",
        "checkpoint.save(tempfile.mkdtemp() + '/d', model)",
    ),
    Row(
        "checkpoint.load('c')",
        "'plan'",
        "load(path, plan)",
        "checkpoint.load('c', plan)",
    ),
    Row(
        "checkpoint.load('c', plan, dtype='bf16')",
        "'bf16'",
        "'bfloat16'",
        "checkpoint.load('c', plan, dtype='bfloat16')",
    ),
    Row(
        "checkpoint.load('c', plan, strict=False)",
        "strict",
        'unread="allow"',
        "checkpoint.load('c', plan, unread='allow')",
    ),
    Row(
        "checkpoint.load('c', plan.specs)",
        "P(",
        "load(path, plan)",
        "checkpoint.load('c', plan)",
    ),
    Row(
        "checkpoint.load(['c'], plan)",
        "list",
        "load(path, plan)",
        "checkpoint.load('c', plan)",
    ),
    Row(
        "checkpoint.left_over(plan)",
        "ShardPlan",
        "left_over(directory)",
        "checkpoint.left_over('.')",
    ),
    Row(
        "checkpoint.read_index(plan)",
        "ShardPlan",
        "read_index(path)",
        "checkpoint.read_index('c')",
    ),
    Row(
        "checkpoint.structs(plan)",
        "ShardPlan",
        "plan.structs",
        "plan.structs",
    ),
    Row(
        "checkpoint.restore('c', plan)",
        "restore",
        "load",
        "checkpoint.load('c', plan)",
    ),
    Row(
        "checkpoint.Manager('m').save(model, 3)",
        "dict",
        "save(step, tree",
        "checkpoint.Manager('m').save(3, model)",
    ),
    Row(
        "checkpoint.Manager('m').restore(plan)",
        "restore",
        "load",
        "checkpoint.Manager('m').latest()",
    ),
    Row(
        "checkpoint.Manager('m', max_to_keep=3)",
        "max_to_keep",
        "keep",
        "checkpoint.Manager('m', keep=3)",
    ),
    Row(
        "checkpoint.Manager('m').load()",
        "'plan'",
        "load(plan",
        "checkpoint.Manager('m').latest()",
    ),
    Row(
        "checkpoint.save(tempfile.mkdtemp() + '/d', {'name': 'run', **model})",
        "name",
        "eqx.filter(tree, eqx.is_array_like)",
        "checkpoint.save(tempfile.mkdtemp() + '/d', model)",
    ),
    Row(
        "checkpoint.save(tempfile.mkdtemp() + '/d', model, plan, step=3)",
        "step",
        "Manager",
        "checkpoint.save(tempfile.mkdtemp() + '/d', model, plan)",
    ),
    Row(
        "checkpoint.saved_plan('c')",
        "c",
        "save(path, tree, plan)",
        "checkpoint.save(tempfile.mkdtemp() + '/d', model, plan); None",
    ),
]

SEEN = [
    Row(
        "cost.estimate(step, (model, x))",
        "one tuple",
        "with a star: `*args`",
        "cost.estimate(step, plan.structs, x, compiler='cpu')",
    ),
    Row(
        "cost.fit(step, plan, x)",
        "argument 0 is a plan",
        "plan.structs",
        "cost.fit(step, plan.structs, x, chip='v5e')",
    ),
    Row(
        "cost.estimate(step, plan.structs, x, chip='v5p')",
        "'chip'",
        "`compiler=",
        "cost.estimate(step, plan.structs, x, compiler='cpu')",
    ),
    Row(
        "cost.estimate(step, plan.structs, x=x)",
        "'x'",
        "by position",
        "cost.estimate(step, plan.structs, x, compiler='cpu')",
    ),
    Row(
        "cost.shardings(step, plan.structs, x, target='tpu:v5e:2x4')",
        "'target'",
        "`compiler=",
        "cost.shardings(step, plan.structs, x, compiler='cpu')",
    ),
    Row(
        "cost.fit(step, plan.structs, x, compiler='cpu')",
        "'compiler'",
        "`chip=",
        "cost.fit(step, plan.structs, x, chip='h100')",
    ),
    Row(
        "cost.fit(step, plan.structs, x, target='tpu:v5e:2x4')",
        "'target'",
        "`chip=",
        "cost.fit(step, plan.structs, x, chip='h100')",
    ),
    Row(
        "cost.compile_for(step, plan.structs, x, chip='v5e')",
        "'chip'",
        "`target=",
        "cost.compile_for(step, plan.structs, x, target=mesh)",
    ),
    Row(
        "cost.compile_for(step, plan.structs, x, devices=jax.devices())",
        "'devices'",
        "`target=`",
        "cost.compile_for(step, plan.structs, x, target=mesh)",
    ),
    Row(
        "cost.policy(step, plan.structs, x, limit_bytes=2**30)",
        "'limit_bytes'",
        "`leave_bytes=`",
        "cost.policy(step, plan.structs, x, chip='h100')",
    ),
    Row(
        "auto.search(step, model, x, mesh=mesh)",
        "'mesh'",
        "`devices=`",
        "auto.plan(model, 8)",
    ),
    Row(
        "testing.check_step(step, model, x, rtol=1e-3)",
        "'rtol'",
        "the step's own rounding",
        "testing.check_step(step, model, x)",
    ),
    Row(
        "testing.verify(step, plan.structs, x, chip='v5p')",
        "'chip'",
        "`compiler=",
        "testing.verify(step, plan.structs, x, compiler='cpu')",
    ),
    Row(
        "cost.fit(step, model, x, chip='tpu')",
        "tpu",
        "v5e",
        "chips.find('v5e')",
    ),
    Row(
        "cost.traffic(jax.make_jaxpr(step)(model, x))",
        "ClosedJaxpr",
        ".compile()",
        "cost.traffic(jax.jit(step).lower(model, x).compile())",
    ),
    Row(
        "cost.seconds(step)",
        "'chip'",
        'seconds(traffic, chip="v5e")',
        "cost.seconds(cost.estimate(step, plan.structs, x, compiler='cpu'), chip='v5e')",
    ),
    Row(
        "sfx.report(plan, width='80')", "'80'", "width=80", "sfx.report(plan, width=80)"
    ),
    Row("sfx.report(plan, 80)", "report", "width=", "sfx.report(plan, width=80)"),
    Row(
        "sfx.explain(plan)",
        "'path'",
        "explain(plan, path)",
        "sfx.explain(plan, 'w')",
    ),
    Row(
        "sfx.explain('w', plan)",
        "str",
        "explain(plan, path)",
        "sfx.explain(plan, 'w')",
    ),
    Row(
        "sfx.lint(model, rules)",
        "PathRules",
        "lint(tree, mesh",
        "sfx.lint(model, mesh, paths=rules)",
    ),
    Row(
        "sfx.lint(plan).errors",
        "errors",
        'worst("error")',
        "sfx.lint(plan).worst('error')",
    ),
    Row("sfx.diff(plan)", "'b'", "diff(a, b)", "sfx.diff(plan, plan)"),
    Row(
        "sfx.html_report(plan, 'report.html')",
        "html_report",
        "write_text(html_report(plan))",
        "pathlib.Path('report.html').write_text(sfx.html_report(plan))",
    ),
    Row(
        "auto.search(step, model, x)",
        "devices",
        "devices=",
        "auto.plan(model, 8)",
    ),
    Row("auto.plan(model)", "'devices'", "plan(tree, devices", "auto.plan(model, 8)"),
    Row(
        "testing.check_step(step(model, x))",
        "Array",
        "check_step(step, *args)",
        "testing.check_step(step, model, x)",
    ),
    Row(
        "hosts.global_batch(x)",
        "'plan'",
        "global_batch(local, plan)",
        "hosts.global_batch(np.ones((8, 8)), sfx.plan(x, mesh, paths=whole))",
    ),
    Row(
        "sync.Sender(plan, b'a secret of both jobs')",
        "ShardPlan",
        "plan_transfer(src, dst)",
        "sync.plan_transfer(plan, plan)",
    ),
    Row(
        "TreeMap(w='model.w')",
        "'w'",
        "TreeMap({",
        "TreeMap({'w': 'model.w'})",
    ),
    Row(
        "From('w').transpose((1, 0))",
        "(1, 0)",
        "transpose(1, 0)",
        "From('w').transpose(1, 0)",
    ),
    Row(
        "From('w').split(0, 2)['q']",
        "'q'",
        ".at(",
        "From('w').split(0, 2, 4).at(0)",
    ),
]

ROWS = [*CALLS, *FILES, *SEEN]
